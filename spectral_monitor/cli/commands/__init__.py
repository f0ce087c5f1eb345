"""One module for each command of ``spectral-monitor``, with a function ``add``."""
