"""Scaling of training with width and depth: parametrizations, their predictions, and sweeps that measure it."""

from spectral_monitor.fitting.power_law import Fit, fit_slope
from spectral_monitor.parametrization.abc_exponents import (
    ABC,
    Classification,
    abc,
    mean_field,
    mup,
    ntp,
    standard,
    uniform,
)
from spectral_monitor.parametrization.catalogue import (
    COMPLETE_P,
    DEPTH_MUP,
    FSC,
    FSC_RESNET,
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
from spectral_monitor.parametrization.normalized_updates import NormalizedUpdates
from spectral_monitor.parametrization.prediction import predict
from spectral_monitor.parametrization.rules import Parametrization, Power, Rule, Scale
from spectral_monitor.scaling.calibration import Calibration, calibrate
from spectral_monitor.scaling.sweeps.limit import reference_run
from spectral_monitor.scaling.sweeps.point import Point
from spectral_monitor.scaling.sweeps.result import SweepResult
from spectral_monitor.scaling.sweeps.slope import Slope
from spectral_monitor.scaling.sweeps.sweep import sweep

__all__ = [
    "ABC",
    "COMPLETE_P",
    "DEPTH_MUP",
    "FSC",
    "FSC_RESNET",
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
    "reference_run",
    "standard",
    "sweep",
    "uniform",
]
