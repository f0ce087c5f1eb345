"""PyTorch Lightning glue: the only place that knows Lightning."""

from .corrector import SpectralLRCorrector
from .monitor import SpectralMonitor

__all__ = ["SpectralLRCorrector", "SpectralMonitor"]
