"""PyTorch Lightning glue; ``lightning_packages`` alone knows what Lightning is called."""

from spectral_monitor.callbacks.corrector import SpectralLRCorrector
from spectral_monitor.callbacks.monitor import SpectralMonitor

__all__ = ["SpectralLRCorrector", "SpectralMonitor"]
