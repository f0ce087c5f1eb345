"""State to resume from: small numbers in the checkpoint, tensors in a file beside it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from spectral_monitor.callbacks.lightning_packages import is_instance
from spectral_monitor.callbacks.training_step_replay import TrainingStepReplay
from spectral_monitor.capture.replay.replay import Replayable
from spectral_monitor.engine import Engine
from spectral_monitor.monitoring.supervisor import Supervisor
from spectral_monitor.state import side_files
from spectral_monitor.state.serialize import fingerprint

if TYPE_CHECKING:
    import lightning.pytorch as pl

LARGE = frozenset({"W0", "probe"})
"""Needs that keep tensors from the start of training, which are too large for every checkpoint."""

State = dict[str, Any]
Warn = Callable[..., None]


class ResumeState:
    """The state that a monitor carries from one fit to the next: through a checkpoint, or in memory for the same model.

    The tensors (the weights that drift is counted from, the batch of ``feature_drift``) are written with the first
    checkpoint, and once more if the first measured step comes later, into files named after their content.
    """

    def __init__(self) -> None:
        self.measured_before = 0
        self._supervisor: Supervisor | None = None
        self._loaded: State = {}
        self._begun = False
        self._folder = Path()
        self._fingerprinted: tuple[object, bool] | None = None  # engine or module, and whether it had the probe batch
        self._fingerprints: list[str] = []  # of the tensors of each process
        self._carried: WeakKeyDictionary[pl.LightningModule, tuple[State, State | None]] = WeakKeyDictionary()
        self._last_module: Callable[[], pl.LightningModule | None] = _no_module

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without state: a copy is for another model or process."""
        return type(self), ()

    def forget(self) -> None:
        """Forget what was loaded or measured before: a fit begins, perhaps of another model."""
        self._loaded, self._begun, self._last_module = {}, False, _no_module

    def load(self, state: State) -> None:
        """Take the state of a checkpoint, for the next fit."""
        self._loaded = state

    def knows(self, module: pl.LightningModule) -> bool:
        """Return whether an earlier fit was of this model."""
        return module in self._carried

    def begin(
        self, trainer: pl.Trainer, module: pl.LightningModule, engine: Engine, supervisor: Supervisor, warn: Warn
    ) -> None:
        """Resume engine and supervisor from the checkpoint or the last fit of this model; else start."""
        self._begun, self._folder, self._fingerprinted, self._supervisor = True, _folder(trainer), None, supervisor
        step, large = trainer.global_step, engine.settings.needs & LARGE
        loaded, self._loaded = self._loaded, {}
        restarted: list[str] = []
        resumed = bool(loaded) or trainer.ckpt_path is not None
        state, tensors = (loaded, None) if loaded else self._carried.get(module, ({}, None))
        try:
            if state:
                if loaded and large:
                    tensors, missing = _find(loaded.get("file"), trainer, engine)
                    missing = engine.first_reason(missing)
                    tensors = None if missing else tensors
                    restarted += [f"drift is counted from here ({missing})"] if missing else []
                restarted += engine.restore(state, tensors, step, partial(_revive, engine, module))
                restarted += _resume_supervisor(supervisor, state)
            else:
                engine.start(step)
                reason = (
                    "the checkpoint has no state of the monitor"
                    if resumed
                    else "this monitor has seen no step of this model"
                )
                restarted += [f"drift is counted from here ({reason})"] if step and large else []
        except Exception as error:
            reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            restarted = [f"all measurements start again here ({reason})"]
            engine.start(step)
        self.measured_before = engine.measured
        self.agree(engine)
        if restarted and trainer.is_global_zero:
            warn(f"{'resumed' if resumed else 'training goes on'} at step {step}: {'; '.join(restarted)}")

    def agree(self, engine: Engine) -> None:
        """Exchange the names of files with the other processes, if there are any; all must call this at once.

        One process writes the names of all files into the checkpoint, and cannot ask the others then.
        """
        version = (engine, engine.probe_taken)
        if engine.processes is not None and engine.settings.needs & LARGE and self._fingerprinted != version:
            try:
                local = fingerprint(engine.tensors())
            except Exception:  # the others are waiting; a file without a name is not found
                local = ""
            self._fingerprinted, self._fingerprints = version, engine.processes.gather(local)

    def state(self, engine: Engine | None) -> State:
        """Return the state for a checkpoint, in plain types; after a fit, the state at its end."""
        if engine is not None and self._begun:
            return self._with_files(*self._state(engine), (engine, engine.probe_taken))
        module = self._last_module()
        if self._loaded or module is None:
            return self._loaded
        return self._with_files(*self._carried[module], (module, True))

    def _state(self, engine: Engine) -> tuple[State, State | None]:
        """Return the small numbers, and the tensors if any are needed."""
        state = engine.state()
        if self._supervisor is not None:
            state = {**state, "oversight": self._supervisor.state_dict()}
        return state, engine.tensors() if engine.settings.needs & LARGE else None

    def _with_files(self, state: State, tensors: State | None, version: tuple[object, bool]) -> State:
        if tensors is None:
            return state
        if self._fingerprinted != version and len(self._fingerprints) <= 1:
            self._fingerprinted, self._fingerprints = version, [fingerprint(tensors)]
        return {**state, "file": side_files.described(self._fingerprints, self._folder)}

    def write(self, state: State, trainer: pl.Trainer, module: pl.LightningModule, engine: Engine | None) -> None:
        """Write the file of this process that a state refers to, if it does not exist and the state is of this run.

        This run chooses the folder, because a loaded state may name any folder.

        Raises:
            OSError: it could not be written.
        """
        prints = self._fingerprints
        if len(prints) != trainer.world_size or state.get("file") != side_files.described(prints, self._folder):
            return
        path = self._folder / side_files.side_file_name(prints[trainer.global_rank])
        if path.exists():
            return
        if engine is not None and self._begun:
            tensors: State | None = engine.tensors()
        else:
            _, tensors = self._carried.get(module, ({}, None))
        if tensors is not None:
            side_files.write(tensors, path)

    def end(self, module: pl.LightningModule, engine: Engine) -> None:
        """Keep the state for another fit of this model, or a checkpoint that is saved after this fit."""
        if self._begun:
            self._carried[module] = self._state(engine)
            self._last_module = ref(module)
            self._fingerprinted = (module, True) if engine.processes is not None else None
        self._begun, self._supervisor = False, None


def _resume_supervisor(supervisor: Supervisor, state: State) -> list[str]:
    """Resume verdicts and corrections; if they start again instead, return a line with the reason."""
    if "oversight" not in state:
        return ["verdicts and corrections start again (the checkpoint has none)"]
    try:
        supervisor.load_state_dict(state["oversight"])
    except ValueError as error:
        return [f"verdicts and corrections start again ({error})"]
    return []


def _no_module() -> None:
    return None


def _revive(engine: Engine, module: pl.LightningModule, packed: State) -> Replayable:
    return TrainingStepReplay.unpack(packed, module) if packed["kind"] == "training_step" else engine.revive(packed)


def _folder(trainer: pl.Trainer) -> Path:
    """Return the folder of checkpoints, or another local folder if that is remote."""
    saving = sorted(
        trainer.checkpoint_callbacks, key=lambda callback: not is_instance(callback, "callbacks.ModelCheckpoint")
    )
    folders = [folder for callback in saving if (folder := getattr(callback, "dirpath", None))]
    local = [str(folder) for folder in (*folders, trainer.default_root_dir) if "://" not in str(folder)]
    return Path(local[0] if local else ".").absolute()


def _find(file: Any, trainer: pl.Trainer, engine: Engine) -> tuple[State | None, str]:
    """Return the tensors that a state refers to, or the reason why they are missing.

    They are looked for beside the checkpoint, then where they were written. The file of this process suffices if it
    covers its shards; else the files of all processes are merged.
    """
    if file is None:
        return None, "the monitor that saved the state did not measure it"
    own_folder = [] if trainer.ckpt_path is None else [Path(str(trainer.ckpt_path)).absolute().parent]
    try:
        fingerprints, original_folder = side_files.checked(file)
    except ValueError as error:
        return None, str(error)
    folders = list(dict.fromkeys([*own_folder, original_folder]))
    if len(fingerprints) == trainer.world_size:
        tensors, missing = side_files.read(fingerprints[trainer.global_rank], folders)
        if tensors is None or engine.covered_by(tensors):
            return tensors, missing
    files = [side_files.read(name, folders) for name in fingerprints]
    missing = next((missing for _, missing in files if missing), "")
    parts = [tensors for tensors, _ in files if tensors is not None]
    return (None, missing) if missing else (engine.merged(parts), "")
