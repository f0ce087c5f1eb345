"""PyTorch Lightning callbacks; only ``lightning_packages`` names the packages of Lightning."""

from spectral_monitor.callbacks.corrector import SpectralLRCorrector
from spectral_monitor.callbacks.monitor import SpectralMonitor

__all__ = ["SpectralLRCorrector", "SpectralMonitor"]
