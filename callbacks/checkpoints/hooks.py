"""Hooks of a monitor around checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from spectral_monitor.callbacks.checkpoints.state import ResumeState
from spectral_monitor.callbacks.lightning_packages import Callback
from spectral_monitor.engine import Engine, Settings
from spectral_monitor.messages import WarnOnce

if TYPE_CHECKING:
    import lightning.pytorch as pl


class CheckpointHooks(Callback):
    """Hooks around checkpoints; a :class:`~spectral_monitor.callbacks.checkpoints.state.ResumeState` does the work."""

    settings: Settings

    def __init__(self) -> None:
        super().__init__()
        self._warn = WarnOnce()
        self._engine: Engine | None = None
        self._continuation = ResumeState()

    @property
    def state_key(self) -> str:
        """The key that distinguishes the monitors of one trainer."""
        s = self.settings
        return self._generate_state_key(
            every_n_steps=s.every_n_steps, quantities=s.quantities, include=s.include, exclude=s.exclude
        )

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Prepare for a checkpoint that may be loaded next."""
        if stage == "fit":
            self._continuation.forget()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: plain numbers, names, and the file with the tensors."""
        try:
            return self._continuation.state(self._engine)
        except Exception as error:
            self._warn(f"the checkpoint has no state of the monitor ({type(error).__name__}: {error})", error)
            return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a loaded state, from which training resumes."""
        self._continuation.load(state_dict)

    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any) -> None:
        """Use the state of a monitor with other settings, if it is the only candidate."""
        used_keys = {callback.state_key for callback in trainer.callbacks}  # type: ignore[attr-defined]
        states = {key: state for key, state in checkpoint["callbacks"].items() if key not in used_keys}
        candidates = [state for key, state in states.items() if str(key).startswith(f"{type(self).__qualname__}{{")]
        if self.state_key not in checkpoint["callbacks"] and len(candidates) == 1:
            self._continuation.load(candidates[0])

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any) -> None:
        """Write the file that the state refers to, if it does not exist yet."""
        state = checkpoint.get("callbacks", {}).get(self.state_key, {})
        with self._errors_as_warnings("a run resumed from this checkpoint counts drift from there"):
            self._continuation.write(state, trainer, pl_module, self._engine)

    @contextmanager
    def _errors_as_warnings(self, consequence: str) -> Iterator[None]:
        """Turn an error inside into a warning that names its consequence."""
        try:
            yield
        except Exception as error:
            self._warn(f"{consequence} ({type(error).__name__}: {error})", error)
