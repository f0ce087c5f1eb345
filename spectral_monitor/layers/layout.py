"""From a parameter as PyTorch stores it to the matrices fan_out x fan_in that it holds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torch import Tensor

Kind = Literal["linear", "transposed", "experts", "experts_transposed", "conv", "patches", "conv_transposed", "vector"]

_AXES = {"transposed": (1, 0), "experts": (1, 2), "experts_transposed": (2, 1), "conv_transposed": (1, 0)}
"""Dimensions of outputs and inputs, where they are not the first two."""


@dataclass(frozen=True)
class Layout:
    """The layout of the matrices in a parameter."""

    # ``"linear"`` (out, in); ``"transposed"`` (in, out); ``"experts"`` (groups, out, in); ``"experts_transposed"``
    # (groups, in, out); ``"conv"`` (out, in / groups, *taps); ``"patches"`` (out, in, *taps), a convolution whose
    # patches do not overlap: one matrix (out, in * taps); ``"conv_transposed"`` (in, out / groups, *taps);
    # ``"vector"``: any shape, one column
    kind: Kind
    shape: tuple[int, ...]  # the parameter's shape, without leading dimensions of 1
    blocks: int = 1  # matrices stacked along the output; groups of a convolution and experts are blocks too
    groups: int = 1  # groups of a convolution, or number of experts
    repeats: int = 1  # turns that the blocks take along the output, for example one per attention head
    sizes: tuple[int, ...] = ()  # outputs of each block at one turn, if blocks differ

    def __post_init__(self) -> None:
        rows = self.outputs
        if self.sizes:
            if len(self.sizes) != self.blocks or sum(self.sizes) * self.repeats != rows or self.groups > 1:
                times = f"{self.repeats} times " if self.repeats > 1 else ""
                raise ValueError(f"cannot split the {rows} outputs of shape {self.shape} into {times}{self.sizes}")
        elif self.blocks < 1 or rows % (self.blocks * self.repeats) or self.blocks % self.groups:
            raise ValueError(
                f"cannot split shape {self.shape} into {self.blocks} blocks: the number must divide its {rows} outputs"
                + (f" and be a multiple of its {self.groups} groups" if self.groups > 1 else "")
            )

    @property
    def outputs(self) -> int:
        """Number of outputs of all blocks."""
        if self.kind == "vector":
            return max(1, math.prod(self.shape))
        return self.shape[self.axes[0]] * self.outer_groups

    @property
    def outer_groups(self) -> int:
        """Number of groups that do not lie along the dimension of outputs."""
        return self.groups if self.kind.startswith("experts") or self.kind == "conv_transposed" else 1

    @property
    def axes(self) -> tuple[int, int]:
        """Dimensions of outputs and inputs; vectors have none."""
        return _AXES.get(self.kind, (0, 1))

    @property
    def fan_out(self) -> int:
        """Number of outputs of the largest block."""
        return max(self.fan_outs)

    @property
    def fan_outs(self) -> tuple[int, ...]:
        """Number of outputs of each block."""
        if self.sizes:
            return tuple(size * self.repeats for size in self.sizes)
        return (self.outputs // self.blocks,) * self.blocks

    @property
    def fan_in(self) -> int:
        """Number of inputs of one block."""
        if self.kind == "vector":
            return 1
        if self.kind == "patches":
            return math.prod(self.shape[1:])
        return self.shape[self.axes[1]] // (self.groups if self.kind == "conv_transposed" else 1)

    @property
    def taps(self) -> int:
        """Number of spatial positions of a convolution kernel; each is a matrix."""
        return math.prod(self.shape[2:]) if self.kind.startswith("conv") else 1

    @cached_property
    def _consecutive(self) -> tuple[int, int, int, int] | None:
        """The shape of the stack, if its entries come in the same order as those of the parameter; else ``None``."""
        if self.repeats > 1 or self.sizes or self.kind not in ("linear", "experts", "patches", "vector"):
            return None
        return 1, self.blocks, self.fan_out, self.fan_in

    def canonical(self, box: Tensor) -> Tensor:
        """Return a rectangular part of the parameter as (taps, outer groups, outputs, inputs), a view."""
        if self.kind == "vector":
            return box.reshape(1, 1, -1, 1)
        if self.kind.startswith("conv"):
            outputs, inputs = self.axes
            by_group: Tensor = box.flatten(2).unflatten(0, (self.outer_groups, -1))
            return by_group.permute(3, 0, 1 + outputs, 1 + inputs)
        if self.kind == "patches":
            box = box.flatten(1)
        matrices = box.mT if self.kind.endswith("transposed") else box
        return matrices.unsqueeze(0) if self.kind.startswith("experts") else matrices[None, None]

    def stack(self, parameter: Tensor) -> Tensor:
        """Return the matrices (taps, blocks, fan_out, fan_in) of a tensor of the parameter's size.

        The result is a view unless blocks take turns or differ in size. Smaller blocks then end in rows of zeros, which
        change no norm and no inner product.
        """
        if self._consecutive is not None:
            return parameter.reshape(self._consecutive)
        turns: Tensor = self.canonical(parameter.reshape(self.shape)).unflatten(2, (self.repeats, -1))
        if not self.sizes:
            by_block: Tensor = turns.unflatten(3, (self.blocks // self.outer_groups, -1)).transpose(2, 3)
            return by_block.flatten(3, 4).flatten(1, 2)
        padded = turns.new_zeros(1, self.blocks, self.fan_out, self.fan_in)
        for block, rows in enumerate(turns[0, 0].split(self.sizes, dim=1)):
            padded[0, block, : self.fan_outs[block]] = rows.flatten(0, 1)
        return padded

    def inputs(self, rows: Tensor) -> Tensor:
        """Return input rows (rows, in) as each block sees them: (blocks or 1, rows, fan_in)."""
        if self.groups == 1 or not self.kind.startswith("conv"):
            return rows.unsqueeze(0)
        by_group: Tensor = rows.unflatten(1, (self.groups, -1)).transpose(0, 1)
        return by_group.repeat_interleave(self.blocks // self.groups, dim=0)
