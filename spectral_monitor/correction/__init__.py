"""Learning rates put right, layer by layer."""

from spectral_monitor.correction.change import Change
from spectral_monitor.correction.corrector import Corrector
from spectral_monitor.correction.init import looks_drawn, rescale, spectral_init_, starting_norm
from spectral_monitor.correction.param_groups import spectral_param_groups
from spectral_monitor.correction.settings import LRCorrection

__all__ = [
    "Change",
    "Corrector",
    "LRCorrection",
    "looks_drawn",
    "rescale",
    "spectral_init_",
    "spectral_param_groups",
    "starting_norm",
]
