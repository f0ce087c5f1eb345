"""Limits of infinite width: what a network becomes when its width grows."""

from spectral_monitor.limits.coefficients import LinearPopulations
from spectral_monitor.limits.kernels import KernelMachine, relu_kernels, softmax_derivative, square_derivative
from spectral_monitor.limits.linear import LinearNetwork, finite_width, infinite_width
from spectral_monitor.limits.neurons import WeightedNeurons
from spectral_monitor.limits.populations import Populations
from spectral_monitor.limits.twin import Twin, at_infinite_width, twin

__all__ = [
    "KernelMachine",
    "LinearNetwork",
    "LinearPopulations",
    "Populations",
    "Twin",
    "WeightedNeurons",
    "at_infinite_width",
    "finite_width",
    "infinite_width",
    "relu_kernels",
    "softmax_derivative",
    "square_derivative",
    "twin",
]
