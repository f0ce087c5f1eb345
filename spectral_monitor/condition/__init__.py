"""Verdicts: which layer violates the spectral condition, how far, and why.

A :class:`SpectralCondition` sets the limits of layers; a :class:`Judge` reads one measurement after the other and
returns :class:`Verdict` objects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spectral_monitor.suggestions import lazy

if TYPE_CHECKING:
    from spectral_monitor.condition.causes import CAUSES
    from spectral_monitor.condition.judge import Judge
    from spectral_monitor.condition.references.profile import Profile, load_profile, save_profile
    from spectral_monitor.condition.settings import SpectralCondition
    from spectral_monitor.condition.verdict import NETWORK, Remedy, Verdict

__all__ = [
    "CAUSES",
    "NETWORK",
    "Judge",
    "Profile",
    "Remedy",
    "SpectralCondition",
    "Verdict",
    "load_profile",
    "save_profile",
]

_WHERE = {
    "CAUSES": "causes",
    "Judge": "judge",
    "NETWORK": "verdict",
    "Profile": "references.profile",
    "Remedy": "verdict",
    "SpectralCondition": "settings",
    "Verdict": "verdict",
    "load_profile": "references.profile",
    "save_profile": "references.profile",
}

if not TYPE_CHECKING:  # a verdict is read from a file without torch
    __getattr__ = lazy(__name__, _WHERE)
