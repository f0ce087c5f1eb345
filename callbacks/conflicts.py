"""Several monitors of one trainer: conflicts between them, and their numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from spectral_monitor.callbacks.checkpoints.hooks import CheckpointHooks
from spectral_monitor.callbacks.lightning_packages import rank_zero_only
from spectral_monitor.messages import say

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from .monitor import SpectralMonitor


def check_conflicts(trainer: pl.Trainer, monitor: SpectralMonitor) -> None:
    """Compare a monitor with those before it, because equal quantities are logged under equal names.

    Two monitors that only watch would log the same numbers twice, which is a warning. If one corrects, their numbers
    would differ, because only that one knows the multipliers. Two that correct would multiply each other's rates, of
    whatever layers: an optimizer has one correction.

    Raises:
        ValueError: naming both, and what to do instead.
    """
    for other in _monitors(trainer):
        if other is monitor:
            return
        if other._engine is None or monitor._engine is None:
            continue
        if other.correction is not None and monitor.correction is not None:
            raise ValueError(f"{_called(other)} and {_called(monitor)} would both correct learning rates: only one may")
        theirs = {layer.info.name for layer in other._engine.layers}
        layers = [layer.info.name for layer in monitor._engine.layers if layer.info.name in theirs]
        keys = [key for key in monitor.settings.keys if key in other.settings.keys]
        if not layers or not keys:
            continue
        found = (
            f"{_called(other)} and {_called(monitor)} would both log spectral_{keys[0]}/{layers[0]} and other numbers "
            f"of the same {len(layers)} layers"
        )
        if correction := other.correction or monitor.correction:
            one = f'SpectralMonitor(mode="correct", correction=LRCorrection("{correction.policy}"))'
            raise ValueError(f"{found}, of which one knows the corrections: use one callback for both, {one}")
        _warn(
            f"{found}: use one, with an interval for each tier or quantity (every_n_steps={{'light': 10, 'standard': "
            "100}), or give each layers of its own"
        )


def monitor_index(trainer: pl.Trainer, monitor: SpectralMonitor) -> int:
    """Return the position of the monitor among those of the trainer, from 1."""
    return next((i for i, one in enumerate(_monitors(trainer), start=1) if one is monitor), 1)


def _monitors(trainer: pl.Trainer) -> list[SpectralMonitor]:
    return cast("list[SpectralMonitor]", [one for one in trainer.callbacks if isinstance(one, CheckpointHooks)])  # type: ignore[attr-defined]


@rank_zero_only
def _warn(text: str) -> None:
    say(text, UserWarning, stacklevel=4)


def _called(monitor: SpectralMonitor) -> str:
    return f"{type(monitor).__name__}(mode={monitor.mode!r})"
