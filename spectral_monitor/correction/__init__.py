"""Learning-rate corrections, layer by layer."""

from spectral_monitor.correction.corrector import Corrector
from spectral_monitor.correction.multiplier import Change
from spectral_monitor.correction.settings import LRCorrection
from spectral_monitor.parametrization.init import spectral_init_
from spectral_monitor.parametrization.param_groups import spectral_param_groups

__all__ = ["Change", "Corrector", "LRCorrection", "spectral_init_", "spectral_param_groups"]
