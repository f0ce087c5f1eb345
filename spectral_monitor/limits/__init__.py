"""Limits of networks as their width grows to infinity."""

from spectral_monitor.fitting.extrapolation import Extrapolation, extrapolate
from spectral_monitor.limits.coefficients import LinearPopulations
from spectral_monitor.limits.kernels import KernelMachine, relu_kernels, softmax_derivative, square_derivative
from spectral_monitor.limits.lazy import LazyScore, lazy_scores
from spectral_monitor.limits.linear import LinearNetwork, finite_width, infinite_width
from spectral_monitor.limits.neuron_twin import NeuronTwin, neuron_twin
from spectral_monitor.limits.neurons import WeightedNeurons
from spectral_monitor.limits.populations import Populations
from spectral_monitor.limits.twin import Twin, at_infinite_width, twin

__all__ = [
    "Extrapolation",
    "KernelMachine",
    "LazyScore",
    "LinearNetwork",
    "LinearPopulations",
    "NeuronTwin",
    "Populations",
    "Twin",
    "WeightedNeurons",
    "at_infinite_width",
    "extrapolate",
    "finite_width",
    "infinite_width",
    "lazy_scores",
    "neuron_twin",
    "relu_kernels",
    "softmax_derivative",
    "square_derivative",
    "twin",
]
