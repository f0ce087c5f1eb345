"""PyTorch Lightning glue: the only place that knows Lightning."""

from spectral_monitor.callbacks.corrector import SpectralLRCorrector
from spectral_monitor.callbacks.monitor import SpectralMonitor

__all__ = ["SpectralLRCorrector", "SpectralMonitor"]
