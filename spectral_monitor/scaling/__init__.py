"""How training scales with width and depth: parametrizations, what is known of them, and sweeps that measure it."""

from spectral_monitor.scaling.exponents import ABC, Classification, abc, mean_field, mup, ntp, standard

__all__ = ["ABC", "Classification", "abc", "mean_field", "mup", "ntp", "standard"]
