"""Limits of infinite width: what a network becomes when its width grows and its features still learn."""

from spectral_monitor.limits.linear import LinearNetwork, finite_width, infinite_width
from spectral_monitor.limits.populations import Populations
from spectral_monitor.limits.twin import Twin, at_infinite_width, twin

__all__ = ["LinearNetwork", "Populations", "Twin", "at_infinite_width", "finite_width", "infinite_width", "twin"]
