"""Verdicts: which layer violates the spectral condition, how far, and why.

A :class:`SpectralCondition` says what layers are held against; a :class:`Judge` is shown one measurement after the
other and returns :class:`Verdict` objects.
"""

from spectral_monitor.condition.bands import bands
from spectral_monitor.condition.causes import CAUSES
from spectral_monitor.condition.judge import Judge
from spectral_monitor.condition.profile import Profile, load_profile, save_profile
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
    "bands",
    "load_profile",
    "save_profile",
]
