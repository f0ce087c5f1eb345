"""The infinite-width twin of a perceptron with an activation: a module of many evenly distributed neurons.

The limit of one hidden layer is a distribution of neurons (u, v). The twin's neurons are points of it from Sobol's
sequence, with equal weights. Expectations over the distribution are means over neurons, so the ordinary probe measures
the limit, up to the error of the sequence.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from spectral_monitor.limits.neurons import DRAWN, drawn_points
from spectral_monitor.limits.scales import WITHOUT_LIMIT, at_limit, limit_scales, param_groups
from spectral_monitor.measurement import Measurement
from spectral_monitor.parametrization.rules import Parametrization

ENTRIES = 2**24
"""The largest number of weights of a twin: 64 MB in float32. Large layers get fewer neurons."""

RELATIVE_TO_START = frozenset({"feature_drift", "kernel_drift", "kernel_alignment"})
"""Quantities relative to the outputs at the start."""
RELATIVE_TO_OUTPUTS = frozenset({"feature_change", "feature_change_local", "kernel_change", "sensitivity"})
"""Quantities relative to the outputs before the step."""

ACTIVATIONS = (
    *(nn.CELU, nn.ELU, nn.GELU, nn.Hardtanh, nn.LeakyReLU, nn.Mish, nn.ReLU),
    *(nn.ReLU6, nn.SELU, nn.Sigmoid, nn.SiLU, nn.Softplus, nn.Softsign, nn.Tanh),
)
"""They act on single entries and grow at most linearly; limits of polynomials are far from any finite network."""


@dataclass(frozen=True)
class NeuronTwin:
    """The neurons that represent an infinitely wide hidden layer, as a module.

    Attributes:
        module: takes the original's inputs, and returns approximately its outputs at infinite width.
        param_groups: for ``torch.optim.SGD``.
        size: number of neurons.
    """

    module: nn.Sequential
    param_groups: list[dict[str, Any]]
    size: int

    def measurement(self, measured: Measurement) -> Measurement:
        """Return a probe's measurement of the module with its values at infinite width.

        Norms that grow or shrink with the width become NaN, with that reason. So do quantities relative to outputs that
        are 0 at the start; the twin's are 0 up to rounding. Other values stay. Verdicts and bands are left out. Names
        of layers may have a prefix, from a module around this one.
        """
        *_, readout = (name for name, _ in self.module.named_children())
        values = {key: column.clone() for key, column in measured.values.items()}
        undefined = (RELATIVE_TO_START | (RELATIVE_TO_OUTPUTS if measured.step == 1 else set())) & values.keys()
        reasons: dict[str, str] = {}
        for i, info in enumerate(measured.layers):
            if info.name.split(".")[-1] == readout:
                for key in undefined:
                    values[key][i] = math.nan
                    reasons[f"{key}/{info.name}"] = "outputs are 0 at the start"
            if info.name.split(".")[-2:] != [readout, "bias"]:  # k numbers, which do not depend on the width
                for key in WITHOUT_LIMIT & values.keys():
                    values[key][i] = math.nan
        limit = at_limit(measured, values)
        return replace(limit, reasons={**limit.reasons, **reasons})


def has_activation(module: nn.Module) -> bool:
    """Return whether a module is an ``nn.Linear``, an activation of single entries and an ``nn.Linear``."""
    layers = list(module) if type(module) is nn.Sequential else []
    return len(layers) == 3 and all(
        type(layer) in kinds for layer, kinds in zip(layers, ((nn.Linear,), ACTIVATIONS, (nn.Linear,)), strict=True)
    )


def neuron_twin(module: nn.Sequential, parametrization: Parametrization, lr: float, seed: int = 0) -> NeuronTwin:
    """Return the infinite-width limit of a perceptron with one hidden layer as a module of many neurons.

    Args:
        module: ``nn.Linear``, activation, ``nn.Linear``. Its weights are not read.
        parametrization: with maximal updates, such as ``MUP``.
        lr: the learning rate that the parametrization's factors multiply.
        seed: of the neurons.

    Raises:
        ValueError: another module; a parametrization without this limit; an invalid learning rate.

    Source: "Feature Learning in Infinite-Width Neural Networks", Theorem 6.1.

    Example:
        >>> from spectral_monitor.scaling import MUP
        >>> net = nn.Sequential(nn.Linear(1, 64, bias=False), nn.Tanh(), nn.Linear(64, 1, bias=False))
        >>> limit = neuron_twin(net, MUP, lr=0.5)
        >>> limit.size, abs(limit.module(torch.ones(1, 1)).item()) < 1e-6
        (131072, True)
    """
    if not has_activation(module):
        kinds = ", ".join(type(layer).__name__ for layer in module.children())
        raise ValueError(
            f"{type(module).__name__}({kinds}) has no limit by neurons: supported is nn.Sequential of an nn.Linear, an "
            "activation of single entries that grows linearly at most, such as nn.Tanh, and an nn.Linear"
        )
    first, activation, readout = module
    assert isinstance(first, nn.Linear)
    assert isinstance(readout, nn.Linear)
    d, k = first.in_features, readout.out_features
    scales = limit_scales(parametrization, lr, d, k)
    # Even, for neurons come in pairs (u, v) and (u, -v), so that outputs are 0 at the start.
    size = min(DRAWN, max(2, ENTRIES // (d + k) // 2 * 2))
    points = drawn_points(d, k, size, seed)
    options = {"dtype": readout.weight.dtype, "device": readout.weight.device}
    wide = nn.Linear(d, size, bias=first.bias is not None, **options)
    out = nn.Linear(size, k, bias=readout.bias is not None, **options)
    with torch.no_grad():
        wide.weight.copy_(scales.su * points[:, :d])
        out.weight.copy_(scales.sv / size * points[:, d:].T)
        for layer in (wide, out):
            if layer.bias is not None:
                layer.bias.zero_()
    weights = (wide.weight, scales.lr_u * size), (out.weight, scales.lr_v / size)
    groups = param_groups(*weights, (wide.bias, scales.lr_b * size), (out.bias, scales.lr_out))
    names = [name for name, _ in module.named_children()]
    return NeuronTwin(nn.Sequential(OrderedDict(zip(names, (wide, activation, out), strict=True))), groups, size)
