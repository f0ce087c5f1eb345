"""From one optimizer step to one measurement; the same for plain loops and for Lightning."""

from spectral_monitor.engine.engine import Engine
from spectral_monitor.engine.settings import Settings

__all__ = ["Engine", "Settings"]
