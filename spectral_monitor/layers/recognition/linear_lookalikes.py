"""Recognise modules that work like ``nn.Linear`` without being one, by what they hold and by the numbers they carry.

Libraries have linear layers of their own, for graph networks or tensor parallelism. A weight (out, in) with at most a
bias beside it is taken for one. Whether the outputs are the inputs times the weight is seen at the first call.
"""

from __future__ import annotations

import re

from torch import nn
from torch.nn.parameter import UninitializedParameter

from spectral_monitor.layers.layout import Layout

_INPUTS = re.compile(r"(^|_)(in|input|inputs)(_|$)")
_OUTPUTS = re.compile(r"(^|_)(out|output|outputs)(_|$)")
_TABLE = re.compile(r"embed|token|code", re.IGNORECASE)


class InputsFirst(nn.Module):
    """The place of a linear layer with a weight (in, out), of which there are only the parameters."""

    def __init__(self, reason: str) -> None:
        """``reason``: why the inputs are known to come first, for the role table."""
        super().__init__()
        self.reason = reason


def linear_layout(module: nn.Module, shape: tuple[int, ...]) -> Layout | None:
    """Return how ``module.weight`` of this shape maps inputs to outputs; ``None`` if the module is no lookalike.

    1. The module holds a 2-D weight and at most a bias, and no module of its own.
    2. Its numbers for inputs and outputs, such as ``in_channels`` and ``out_channels``, are the sides of the weight.
    3. Where it has no such numbers, a bias as long as one side says that this side is the outputs.
    """
    if len(shape) != 2 or not holds_one_matrix(module) or any(_TABLE.search(name) for name in vars(module)):
        return None
    inputs, outputs = _numbers(module, _INPUTS), _numbers(module, _OUTPUTS)
    bias = _length(module)
    if bias is None:
        return None
    if not inputs and not outputs:
        inputs, outputs = ({*shape}, {bias}) if bias else (set(), set())
    for kind, (rows, columns) in (("linear", shape), ("transposed", shape[::-1])):
        if rows in outputs and columns in inputs and bias in (0, rows):
            return Layout("linear" if kind == "linear" else "transposed", shape)
    return None


def holds_one_matrix(module: nn.Module) -> bool:
    """Return whether a module has no parameters but a weight and a bias."""
    return {name for name, _ in module.named_parameters()} <= {"weight", "bias"}


def _numbers(module: nn.Module, pattern: re.Pattern[str]) -> set[int]:
    """Return the whole numbers that a module has under names of a pattern."""
    found = (value for name, value in vars(module).items() if pattern.search(name))
    return {value for value in found if isinstance(value, int) and not isinstance(value, bool)}


def _length(module: nn.Module) -> int | None:
    """Return the length of a module's bias, 0 without one; ``None`` if that is no vector."""
    bias = module._parameters.get("bias")
    if bias is None:
        return 0
    return len(bias) if not isinstance(bias, UninitializedParameter) and bias.ndim == 1 else None
