"""A run whose state is saved and loaded by its loop."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from spectral_monitor.engine import Engine
from spectral_monitor.messages import SpectralMonitorWarning
from spectral_monitor.monitoring.live_run import LiveRun
from spectral_monitor.monitoring.supervisor import Supervisor


class ResumableRun(LiveRun):
    """A live run in a process that may begin in the middle of training.

    Attributes:
        steps: optimizer steps taken so far, those before this process included.
    """

    _engine: Engine
    _supervisor: Supervisor
    _begun = False
    steps = 0
    rank = 0

    @property
    def is_first(self) -> bool:
        """True in the process that speaks for all."""
        return self.rank == 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state to go on measuring in another process: plain types and CPU tensors, shared, not copied.

        That is a host copy of the measured weights, which drift is counted from, the batch ``feature_drift`` is
        measured on, and counters; not the measurements. ``torch.load(..., weights_only=True)`` reads it. Of several
        processes each has its own part and has to save it.
        """
        state = {**self._engine.state(), "oversight": self._supervisor.state_dict()}
        return {"steps": self.steps, "state": state, "tensors": self._engine.tensors()}

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on from what :meth:`state_dict` gave, when the model has its weights back; to be called in all processes.

        What starts again all the same, such as ``feature_drift`` where the batch held more than tensors, containers
        and numbers, is said in a warning.

        Args:
            state: what this process saved; or, where there were more or fewer processes, what all saved, by rank.

        Raises:
            ValueError: it is of other layers, which are named, or of another version; nothing has been changed then.
        """
        several = [state] if isinstance(state, Mapping) else list(state)
        if not several:
            raise ValueError("load_state_dict was given the states of no process")
        for one in several:
            if not isinstance(one, Mapping) or not {"steps", "state", "tensors"} <= one.keys():
                raise ValueError("load_state_dict needs what state_dict() returned, with steps, state and tensors")
        mine, tensors = self._engine.part_of(several)
        anew = self._engine.restore(mine["state"], tensors, int(mine["steps"]))
        self.steps = int(mine["steps"])
        self._begun = self.steps > 0
        if "oversight" in mine["state"]:
            self._supervisor.load_state_dict(mine["state"]["oversight"])
        if anew and self.is_first:
            warnings.warn(f"resumed at step {self.steps}: {'; '.join(anew)}", SpectralMonitorWarning, stacklevel=2)

    def resume_at(self, step: int) -> None:
        """Go on at a step for which there is no state, in all processes: drift is counted from there.

        Args:
            step: optimizer steps taken so far.

        Raises:
            ValueError: it is no integer, or below 0.
        """
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"step must be an integer >= 0, the optimizer steps taken so far; got {step!r}")
        self._engine.start(step)
        self.steps, self._begun = step, True
