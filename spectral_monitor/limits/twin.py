"""The infinite-width twin of a module: an ordinary module of width d + k, trained by plain SGD.

It exists where a linear map directly follows an embedding or a linear map: word vectors, LoRA pairs, matrix
factorization, probes with a bottleneck.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from spectral_monitor.limits.neuron_twin import NeuronTwin, has_activation, neuron_twin
from spectral_monitor.limits.scales import WITHOUT_LIMIT, at_limit, limit_scales, param_groups
from spectral_monitor.measurement import Measurement
from spectral_monitor.parametrization.rules import Parametrization

Layer = Literal["hidden", "readout"]

SUPPORTED = (
    "nn.Sequential of an nn.Linear or nn.Embedding and an nn.Linear; for an activation such as nn.Tanh between two "
    "nn.Linear, limits.neuron_twin, which reference_run and sweep(limit='exact') take"
)

OUTPUT_SIZE = frozenset({"feature_rms", "sensitivity"})
"""Quantities in units of a layer's outputs, as a root mean square."""

NATURAL = frozenset({"weight_natural", "update_natural", "readout_row"})
"""Quantities in units of outputs over inputs, both as a root mean square."""


@dataclass(frozen=True)
class Twin:
    """The coefficients of an infinitely wide module, as a module of width d + k.

    Attributes:
        module: takes the original's inputs, and returns its outputs at infinite width.
        param_groups: for ``torch.optim.SGD``, with the learning rates at infinite width.
        size: d + k, the width of the module.
    """

    module: nn.Sequential
    param_groups: list[dict[str, Any]]
    size: int

    def measurement(self, measured: Measurement) -> Measurement:
        """Return a probe's measurement of the module with its values at infinite width.

        Norms that grow or shrink with the width become NaN, with that reason. Verdicts and bands are left out: the
        coefficients are no network to judge. Names of layers may have a prefix, from a module around this one.
        """
        hidden, readout = (name for name, _ in self.module.named_children())
        values = {key: column.clone() for key, column in measured.values.items()}
        for i, info in enumerate(measured.layers):
            parts = info.name.split(".")
            layer: Layer = "hidden" if hidden in parts else "readout"
            if layer == "readout" and readout in parts and parts[-1] == "bias":
                continue  # k numbers, which do not depend on the width
            for key, column in values.items():
                column[i] = at_infinite_width(key, float(column[i]), layer=layer, size=self.size)
        return at_limit(measured, values)


def twin(module: nn.Module, parametrization: Parametrization, lr: float) -> Twin:
    """Return the infinite-width limit of a module as an ordinary module.

    SGD on it, with momentum, weight decay and clipping by the norm, is the limit of SGD on the original. Adam is not:
    it acts on entries, and the coefficients have other axes.

    Args:
        module: an ``nn.Sequential`` of an ``nn.Linear`` or ``nn.Embedding`` and an ``nn.Linear``. Its weights are not
            read: the twin begins as the parametrization says.
        parametrization: with maximal updates, such as ``MUP``.
        lr: the learning rate that the parametrization's factors multiply.

    Raises:
        ValueError: another module, by name; a parametrization without this limit; an invalid learning rate.

    Source: "Feature Learning in Infinite-Width Neural Networks", Theorem D.1.

    Example:
        >>> import torch
        >>> from spectral_monitor.scaling import MUP
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 512), torch.nn.Linear(512, 2, bias=False))
        >>> limit = twin(net, MUP, lr=0.1)
        >>> limit.module
        Sequential(
          (0): Linear(in_features=4, out_features=6, bias=True)
          (1): Linear(in_features=6, out_features=2, bias=False)
        )
        >>> [round(group["lr"], 4) for group in limit.param_groups]
        [0.025, 0.1, 0.2]
    """
    first, readout = _pair(module)
    embeds = isinstance(first, nn.Embedding)
    d = first.num_embeddings if isinstance(first, nn.Embedding) else first.in_features
    k = readout.out_features
    fan_in = 1 if embeds else d
    scales = limit_scales(parametrization, lr, fan_in, k)
    dtype, device = readout.weight.dtype, readout.weight.device
    new: nn.Linear | nn.Embedding
    if isinstance(first, nn.Embedding):
        new, bias = nn.Embedding(d, d + k, dtype=dtype, device=device), None
    else:
        new = nn.Linear(d, d + k, bias=first.bias is not None, dtype=dtype, device=device)
        bias = new.bias
    out = nn.Linear(d + k, k, bias=readout.bias is not None, dtype=dtype, device=device)
    with torch.no_grad():
        for parameter in (*new.parameters(), *out.parameters()):
            parameter.zero_()
        (new.weight.T if embeds else new.weight)[:d].fill_diagonal_(scales.su)  # [su 1; 0], (d + k, d)
        out.weight[:, d:].fill_diagonal_(scales.sv)  # [0, sv 1], (k, d + k)
    rates = (new.weight, scales.lr_u), (bias, scales.lr_b), (out.weight, scales.lr_v), (out.bias, scales.lr_out)
    names = [name for name, _ in module.named_children()]
    return Twin(nn.Sequential(OrderedDict(zip(names, (new, out), strict=True))), param_groups(*rates), d + k)


def twin_inside(module: nn.Module, parametrization: Parametrization, lr: float) -> tuple[nn.Module, Twin | NeuronTwin]:
    """Return a module whose layers are replaced by their twin, in place, and that twin.

    Args:
        module: an ``nn.Sequential`` as for :func:`twin`, one with an activation of single entries between two
            ``nn.Linear``, or a module with one inside that has all its parameters, such as one that also computes the
            loss.
        parametrization, lr: as for :func:`twin`.

    Raises:
        ValueError: a module without such layers; the rest as for :func:`twin`.
    """
    if type(module) is nn.Sequential:
        replacement = _any_twin(module, parametrization, lr)
        return replacement.module, replacement
    all_ids = {id(parameter) for parameter in module.parameters()}
    for parent in module.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Sequential and {id(parameter) for parameter in child.parameters()} == all_ids:
                replacement = _any_twin(child, parametrization, lr)
                setattr(parent, name, replacement.module)
                return module, replacement
    raise ValueError(f"{type(module).__name__} has no exact limit here: supported is a module around an {SUPPORTED}")


def _any_twin(module: nn.Sequential, parametrization: Parametrization, lr: float) -> Twin | NeuronTwin:
    """Return the twin of a linear pair, or that of a perceptron with an activation."""
    return (neuron_twin if has_activation(module) else twin)(module, parametrization, lr)


def at_infinite_width(key: str, value: float, *, layer: Layer, size: int) -> float:
    """Return the value at infinite width of a quantity that was measured on a twin.

    Args:
        key: name of the quantity.
        value: as measured on the twin.
        layer: ``"hidden"`` for the first matrix, ``"readout"`` for the second.
        size: width d + k of the twin.

    Returns:
        The value; NaN for a quantity without a limit.

    Example:
        >>> at_infinite_width("feature_rms", 0.5, layer="hidden", size=16)
        2.0
    """
    if key in WITHOUT_LIMIT:
        return math.nan
    scale = math.sqrt(size) if layer == "hidden" else 1 / math.sqrt(size)
    if key in NATURAL:
        return value * scale
    if key == "gradient_natural":  # in units of the loss over a natural norm of weights
        return value / scale
    if key in OUTPUT_SIZE and layer == "hidden":
        return value * scale
    return value


def _pair(module: nn.Module) -> tuple[nn.Linear | nn.Embedding, nn.Linear]:
    """Return the two layers of a supported module, or refuse it by name."""
    name = type(module).__name__
    if type(module) is not nn.Sequential:
        raise ValueError(f"{name} has no exact limit here: supported is {SUPPORTED}")
    layers = list(module)
    if len(layers) != 2:
        raise ValueError(f"{name} of {len(layers)} modules has no exact limit here: supported is {SUPPORTED}")
    first, readout = layers
    if type(first) is not nn.Linear and type(first) is not nn.Embedding:
        raise ValueError(f"'0', a {type(first).__name__}, has no exact limit here: supported is {SUPPORTED}")
    if type(readout) is not nn.Linear:
        raise ValueError(f"'1', a {type(readout).__name__}, has no exact limit here: supported is {SUPPORTED}")
    if isinstance(first, nn.Embedding) and (first.padding_idx is not None or first.max_norm is not None):
        raise ValueError("'0', an Embedding with padding_idx or max_norm, has no exact limit here: leave them out")
    assert isinstance(first, (nn.Linear, nn.Embedding))
    assert isinstance(readout, nn.Linear)
    return first, readout
