"""How training scales with width and depth: parametrizations, what is known of them, and sweeps that measure it."""

from spectral_monitor.scaling.calibration import Calibration, calibrate
from spectral_monitor.scaling.exponents import ABC, Classification, abc, mean_field, mup, ntp, standard
from spectral_monitor.scaling.fit import Fit, fit_slope
from spectral_monitor.scaling.normalized import NormalizedUpdates
from spectral_monitor.scaling.parametrization import Parametrization, Power, Rule, Scale
from spectral_monitor.scaling.parametrizations import (
    FSC,
    MF_MUP,
    MFP,
    MUP,
    NTK,
    NTP,
    PARAMETRIZATIONS,
    SP,
    SPECTRAL,
    from_abc,
    fsc_resnet,
)
from spectral_monitor.scaling.points import Point
from spectral_monitor.scaling.prediction import predict
from spectral_monitor.scaling.sweep_result import SweepResult
from spectral_monitor.scaling.sweep_slope import Slope
from spectral_monitor.scaling.sweeps import sweep

__all__ = [
    "ABC",
    "FSC",
    "MFP",
    "MF_MUP",
    "MUP",
    "NTK",
    "NTP",
    "PARAMETRIZATIONS",
    "SP",
    "SPECTRAL",
    "Calibration",
    "Classification",
    "Fit",
    "NormalizedUpdates",
    "Parametrization",
    "Point",
    "Power",
    "Rule",
    "Scale",
    "Slope",
    "SweepResult",
    "abc",
    "calibrate",
    "fit_slope",
    "from_abc",
    "fsc_resnet",
    "mean_field",
    "mup",
    "ntp",
    "predict",
    "standard",
    "sweep",
]
