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
    would differ, because only that one knows the multipliers. If both correct, they would multiply each other's rates,
    whatever their layers are: an optimizer has one correction.

    Raises:
        ValueError: naming both, and what to do instead.
    """
    for other in _monitors(trainer):
        if other is monitor:
            return
        if other._engine is None or monitor._engine is None:
            continue
        if other.correction is not None and monitor.correction is not None:
            raise ValueError(
                f"{_called(other)} and {_called(monitor)} would both correct learning rates: remove one of them"
            )
        theirs = {layer.info.name for layer in other._engine.layers}
        layers = [layer.info.name for layer in monitor._engine.layers if layer.info.name in theirs]
        keys = [key for key in monitor.settings.keys if key in other.settings.keys]
        if not layers or not keys:
            continue
        conflict = (
            f"{_called(other)} and {_called(monitor)} would both log spectral_{keys[0]}/{layers[0]} and other numbers "
            f"of the same {len(layers)} layers"
        )
        if correction := other.correction or monitor.correction:
            suggestion = f'SpectralMonitor(mode="correct", correction=LRCorrection("{correction.policy}"))'
            raise ValueError(
                f"{conflict}, and only one of them knows the corrections: use one callback for both, {suggestion}"
            )
        _warn(
            f"{conflict}: use one, with an interval for each tier or quantity (every_n_steps={{'light': 10, "
            "'standard': 100}), or give each its own layers"
        )


def monitor_index(trainer: pl.Trainer, monitor: SpectralMonitor) -> int:
    """Return the position of the monitor among those of the trainer, from 1."""
    return next((i for i, other in enumerate(_monitors(trainer), start=1) if other is monitor), 1)


def _monitors(trainer: pl.Trainer) -> list[SpectralMonitor]:
    return cast("list[SpectralMonitor]", [item for item in trainer.callbacks if isinstance(item, CheckpointHooks)])  # type: ignore[attr-defined]


@rank_zero_only
def _warn(text: str) -> None:
    say(text, UserWarning, stacklevel=4)


def _called(monitor: SpectralMonitor) -> str:
    return f"{type(monitor).__name__}(mode={monitor.mode!r})"
