"""From one optimizer step to one measurement; the same for plain loops and for Lightning."""

from spectral_monitor.engine.engine import Engine
from spectral_monitor.engine.settings import Settings
from spectral_monitor.engine.state import CLEARED, START, STEP_LOSS, TURN, still_due

__all__ = ["CLEARED", "START", "STEP_LOSS", "TURN", "Engine", "Settings", "still_due"]
