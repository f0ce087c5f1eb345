"""How training scales with width and depth: parametrizations, what is known of them, and sweeps that measure it."""

from spectral_monitor.scaling.exponents import ABC, Classification, abc, mean_field, mup, ntp, standard
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
from spectral_monitor.scaling.prediction import predict

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
    "Classification",
    "NormalizedUpdates",
    "Parametrization",
    "Power",
    "Rule",
    "Scale",
    "abc",
    "from_abc",
    "fsc_resnet",
    "mean_field",
    "mup",
    "ntp",
    "predict",
    "standard",
]
