"""Recognize modules that work like ``nn.Linear`` without being one, by their parameters and their numbers of features.

Libraries have linear layers of their own, for graph networks or tensor parallelism. A module with a weight (out, in)
and at most a bias is taken for one. The first call shows whether its outputs are the inputs times the weight.
"""

from __future__ import annotations

import re

from torch import nn
from torch.nn.parameter import UninitializedParameter

from spectral_monitor.layers.layout import Kind, Layout

_INPUTS = re.compile(r"(^|_)(in|input|inputs)(_|$)")
_OUTPUTS = re.compile(r"(^|_)(out|output|outputs)(_|$)")
_TABLE = re.compile(r"embed|token|code", re.IGNORECASE)


class InputsFirst(nn.Module):
    """A stand-in for a linear layer with a weight (in, out), where only the parameters are available."""

    def __init__(self, reason: str) -> None:
        """``reason``: why the inputs are known to come first, for the role table."""
        super().__init__()
        self.reason = reason


def linear_layout(module: nn.Module, shape: tuple[int, ...]) -> Layout | None:
    """Return how ``module.weight`` of this shape maps inputs to outputs; ``None`` if the module is no lookalike.

    1. The only parameters of the module are a 2-D weight and at most a bias.
    2. Its attributes for inputs and outputs, such as ``in_channels`` and ``out_channels``, are the sides of the weight.
    3. If it has no such attributes, the side as long as the bias is the outputs.
    """
    if len(shape) != 2 or not holds_one_matrix(module) or any(_TABLE.search(name) for name in vars(module)):
        return None
    inputs, outputs = _numbers(module, _INPUTS), _numbers(module, _OUTPUTS)
    bias = _bias_length(module)
    if bias is None:
        return None
    if not inputs and not outputs:
        inputs, outputs = ({*shape}, {bias}) if bias else (set(), set())
    kinds: tuple[Kind, Kind] = ("linear", "transposed")
    for kind, (rows, columns) in zip(kinds, (shape, shape[::-1]), strict=True):
        if rows in outputs and columns in inputs and bias in (0, rows):
            return Layout(kind, shape)
    return None


def holds_one_matrix(module: nn.Module) -> bool:
    """Return whether a module has no parameters but a weight and a bias."""
    return {name for name, _ in module.named_parameters()} <= {"weight", "bias"}


def _numbers(module: nn.Module, pattern: re.Pattern[str]) -> set[int]:
    """Return the integers among the attributes of a module whose names match a pattern."""
    values = (value for name, value in vars(module).items() if pattern.search(name))
    return {value for value in values if isinstance(value, int) and not isinstance(value, bool)}


def _bias_length(module: nn.Module) -> int | None:
    """Return the length of a module's bias, 0 without one; ``None`` if it is no vector."""
    bias = module._parameters.get("bias")
    if bias is None:
        return 0
    return len(bias) if not isinstance(bias, UninitializedParameter) and bias.ndim == 1 else None
