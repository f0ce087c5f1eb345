"""Layer by layer: is your network learning features at the right size?

``SpectralMonitor`` is a PyTorch Lightning callback, ``SpectralProbe`` the same for plain loops; both fill
``Measurement`` tables. The formulas stand alone in ``spectral_monitor.functional``, and as metrics in
``spectral_monitor.metrics``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spectral_monitor.measurement import LayerInfo, Measurement
from spectral_monitor.probe import SpectralProbe
from spectral_monitor.warnings import SpectralMonitorWarning

if TYPE_CHECKING:
    from spectral_monitor.callbacks import SpectralMonitor

__version__ = "0.1.0"
__all__ = ["LayerInfo", "Measurement", "SpectralMonitor", "SpectralMonitorWarning", "SpectralProbe"]


def __getattr__(name: str) -> Any:
    if name == "SpectralMonitor":  # only here is Lightning imported
        from spectral_monitor.callbacks import SpectralMonitor

        return SpectralMonitor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
