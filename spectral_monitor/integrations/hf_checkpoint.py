"""Files beside the Trainer's checkpoints, from which a probe resumes.

Every process has a small file in the folder of each checkpoint. Tensors are large and change at most once, so they are
written once to a folder beside the checkpoints, which the Trainer does not push to the Hub.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from spectral_monitor.messages import SpectralMonitorWarning, WarnOnce
from spectral_monitor.monitoring.probe import SpectralProbe
from spectral_monitor.state import side_files
from spectral_monitor.state.serialize import fingerprint

TENSORS_FOLDER = "_spectral_monitor"
"""The folder of tensors; the Trainer does not push names that begin with an underscore."""
STATE_FILE = "spectral_monitor_{}.pt"
"""The file of a process in a checkpoint, by rank."""
STATE_KEYS = {"steps", "state", "fingerprint", "processes"}
"""Keys that every such file has."""

State = dict[str, Any]


class ResumeFiles:
    """Writes and reads the files of one run. ``folder`` is where its checkpoints are."""

    def __init__(self, folder: Path, probe: SpectralProbe, warn: WarnOnce) -> None:
        self._folder, self._probe, self._warn = folder, probe, warn
        self._engine = probe._engine
        self._written: tuple[bool, str] | None = None  # whether tensors had the probe batch, and their fingerprint

    def save(self, checkpoint: str) -> None:
        """Write the files of this process for a checkpoint; errors become warnings."""
        try:
            state = self._probe.state_dict()
            tensors, probe_taken = state.pop("tensors"), self._engine.probe_taken
            if self._written is None or self._written[0] != probe_taken:
                digest = fingerprint(tensors)
                side_files.write(tensors, self._folder / TENSORS_FOLDER / side_files.side_file_name(digest))
                self._written = (probe_taken, digest)
            state |= {"fingerprint": self._written[1], "processes": self._probe.processes}
            side_files.write(state, self._folder / checkpoint / STATE_FILE.format(self._probe.rank))
        except Exception as error:
            self._warn(f"the checkpoint has no state of the monitor ({type(error).__name__}: {error})", error)

    def load(self, checkpoint: Path, step: int) -> None:
        """Resume the probe from a checkpoint, or at its step if that has no state. All processes must call this.

        Args:
            checkpoint: its folder.
            step: optimizer steps taken.
        """
        processes, read = self._engine.processes, partial(self._read, checkpoint)
        try:
            self._probe.load_state_dict(read() if processes is None else processes.all_or_none(read))
        except Exception as error:
            reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            self._probe.resume_at(step)
            if self._probe.is_first:
                message = f"resumed at step {step}: drift is counted from here ({reason})"
                warnings.warn(message, SpectralMonitorWarning, stacklevel=2)

    def _read(self, checkpoint: Path) -> list[State]:
        """Return the state of this process; if the number of processes has changed, those of all that wrote it.

        Raises:
            ValueError: files are missing or not of the monitor.
        """
        own = checkpoint / STATE_FILE.format(self._probe.rank)
        first = self._read_file(own if own.is_file() else checkpoint / STATE_FILE.format(0))
        count: int = first["processes"]
        ranks = [self._probe.rank] if count == self._probe.processes else range(count)
        return [self._with_tensors(self._read_file(checkpoint / STATE_FILE.format(rank)), checkpoint) for rank in ranks]

    def _read_file(self, file: Path) -> State:
        if not file.is_file():
            raise ValueError(
                f"{file} is missing; if the checkpoint is elsewhere, give its folder to SpectralCallback as resume_from"
            )
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:
            raise ValueError(f"{file} cannot be read ({type(error).__name__})") from error
        if not isinstance(state, dict) or not isinstance(state.get("processes"), int) or not state.keys() >= STATE_KEYS:
            raise ValueError(f"{file} was not written by the monitor")
        return state

    def _with_tensors(self, state: Mapping[str, Any], checkpoint: Path) -> State:
        """Return a state with its tensors, or with the reason why they are missing."""
        parents = dict.fromkeys([checkpoint.absolute().parent, self._folder.absolute()])
        folders = [parent / TENSORS_FOLDER for parent in parents]
        tensors, missing = side_files.read(side_files.checked_fingerprint(state["fingerprint"]), folders)
        return {**state, "tensors": tensors or {"start": {}, "probe": None, "no_probe": missing}}
