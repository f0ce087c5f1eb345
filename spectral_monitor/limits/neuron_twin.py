"""The infinite-width twin of a perceptron with an activation: a module of many neurons that are spread evenly.

The limit of one hidden layer is a distribution of neurons (u, v). Each of the twin's neurons is a point of it, drawn by
Sobol's sequence, all of the same weight. Expectations over the distribution are means over its neurons, so that the
ordinary probe measures the limit, to the error of the sequence.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from spectral_monitor.limits.neurons import DRAWN, drawn_points
from spectral_monitor.limits.scales import WITHOUT_LIMIT, limit_scales, of_limit, param_groups
from spectral_monitor.measurement import Measurement
from spectral_monitor.parametrization.rules import Parametrization

ENTRIES = 2**24
"""Weights of a twin, at most: 64 MB in float32. Fewer neurons then stand for the distribution."""

RELATIVE_TO_START = frozenset({"feature_drift", "kernel_drift", "kernel_alignment"})
"""Quantities that the outputs at the start divide."""
RELATIVE_TO_OUTPUTS = frozenset({"feature_change", "feature_change_local", "kernel_change", "sensitivity"})
"""Quantities that the outputs before the step divide."""

ACTIVATIONS = (
    *(nn.CELU, nn.ELU, nn.GELU, nn.Hardtanh, nn.LeakyReLU, nn.Mish, nn.ReLU),
    *(nn.ReLU6, nn.SELU, nn.Sigmoid, nn.SiLU, nn.Softplus, nn.Softsign, nn.Tanh),
)
"""Act on single entries and grow linearly at most; polynomials have limits that no finite network is near."""


@dataclass(frozen=True)
class NeuronTwin:
    """The neurons that stand for an infinitely wide hidden layer, as a module.

    Attributes:
        module: reads what the original reads, and returns about the outputs that it has at infinite width.
        param_groups: for ``torch.optim.SGD``.
        size: number of neurons.
    """

    module: nn.Sequential
    param_groups: list[dict[str, Any]]
    size: int

    def measurement(self, measured: Measurement) -> Measurement:
        """Return what a probe measured on the module as it is at infinite width.

        Norms that go with the width become NaN, with that reason. So does what is relative to outputs that are 0 at the
        start, which the twin's are to rounding only. All else is as it is. Verdicts and bands are left out. Layers'
        names may have a prefix, as of a module around this one.
        """
        *_, readout = (name for name, _ in self.module.named_children())
        values = {key: column.clone() for key, column in measured.values.items()}
        undefined = (RELATIVE_TO_START | (RELATIVE_TO_OUTPUTS if measured.step == 1 else set())) & values.keys()
        reasons: dict[str, str] = {}
        for place, info in enumerate(measured.layers):
            if info.name.split(".")[-1] == readout:
                for key in undefined:
                    values[key][place] = math.nan
                    reasons[f"{key}/{info.name}"] = "outputs are 0 at the start"
            if info.name.split(".")[-2:] != [readout, "bias"]:  # k numbers, which do not depend on the width
                for key in WITHOUT_LIMIT & values.keys():
                    values[key][place] = math.nan
        found = of_limit(measured, values)
        return replace(found, reasons={**found.reasons, **reasons})


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
        ValueError: another module; a parametrization without this limit; a learning rate that is none.

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
    # An even number, for neurons come in pairs (u, v) and (u, -v): outputs are 0 at the start.
    size = min(DRAWN, max(2, ENTRIES // (d + k) // 2 * 2))
    points = drawn_points(d, k, size, seed)
    like = {"dtype": readout.weight.dtype, "device": readout.weight.device}
    wide = nn.Linear(d, size, bias=first.bias is not None, **like)
    out = nn.Linear(size, k, bias=readout.bias is not None, **like)
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
