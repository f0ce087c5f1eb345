"""Settings that the callback and the probe share: modes, conditions, corrections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args

from spectral_monitor.condition import SpectralCondition
from spectral_monitor.correction import LRCorrection
from spectral_monitor.quantities import resolve

Mode = Literal["observe", "warn", "correct"]
MODES: tuple[str, ...] = get_args(Mode)


def checked(mode: str, condition: SpectralCondition, correction: LRCorrection | None) -> LRCorrection | None:
    """Return the correction to use, after a check of all three settings.

    Raises:
        ValueError: an unknown mode, or a correction in a mode that does not correct.
        TypeError: a condition or correction of another type.
    """
    if mode not in MODES:
        raise ValueError(f"unknown mode {mode!r}; valid modes: {', '.join(MODES)}")
    if not isinstance(condition, SpectralCondition):
        raise TypeError(f"condition must be a SpectralCondition, got {condition!r}")
    if correction is not None and not isinstance(correction, LRCorrection):
        raise TypeError(f"correction must be an LRCorrection, got {correction!r}")
    if correction is not None and mode != "correct":
        raise ValueError(f'correction needs mode="correct", got mode={mode!r}')
    return LRCorrection() if mode == "correct" and correction is None else correction


def with_needed(quantities: str | Sequence[str], correction: LRCorrection | None) -> str | Sequence[str]:
    """Return the requested quantities and those that the correction needs."""
    needed = () if correction is None else correction.quantities
    return quantities if set(needed) <= set(resolve(quantities)) else [*resolve(quantities), *needed]


def described(mode: str, condition: SpectralCondition, correction: LRCorrection | None) -> dict[str, Any]:
    """Return settings as plain values by name, for tables of hyperparameters.

    Example:
        >>> described("warn", SpectralCondition(), None)["condition/reference"]
        'balance'
    """
    low, high = condition.limits
    settings: dict[str, Any] = {
        "mode": mode,
        "condition/reference": _file(condition.reference),
        "condition/band_low": low,
        "condition/band_high": high,
        "condition/persistence": condition.persistence,
        "condition/hysteresis": condition.hysteresis,
        "condition/expected": ", ".join(f"{pattern} x{factor:g}" for pattern, factor in condition.expected.items()),
        "condition/ignore": ", ".join(condition.ignore),
    }
    if correction is not None:
        settings |= {f"correction/{f.name}": getattr(correction, f.name) for f in fields(correction) if f.init}
        settings["correction/reference"] = _file(correction.reference or "")
    return {key: value if isinstance(value, bool | int | float) else str(value) for key, value in settings.items()}


def _file(reference: str | Path) -> str:
    """Return the name of a file without its folder, which may be private."""
    return Path(reference).name
