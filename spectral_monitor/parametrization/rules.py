"""Parametrizations as data: initial weights and learning rates by the position of a matrix and its fans."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from spectral_monitor.layers import Layer, dissect
from spectral_monitor.parametrization.init import by_entry, refuse_spread
from spectral_monitor.parametrization.layer_position import Kind, LayerPosition, by_parameter
from spectral_monitor.parametrization.param_groups import Family, check_family, grouped

Outputs = Literal["dense", "sparse"]

BIAS = re.compile(r".*bias(_[ih]h(_l\d+)?(_reverse)?)?")
"""Names of biases, those of recurrent cells included; attention's ``bias_k`` and ``bias_v`` are tokens."""


@dataclass(frozen=True)
class Power:
    """``factor * fan_in^a * fan_out^b * L^c``, with L the depth.

    Example:
        >>> rate = Power(fan_in=-1, fan_out=1, depth=-2)
        >>> print(rate, "=", rate.at(fan_in=64, fan_out=256, depth=2))
        fan_out / (fan_in L^2) = 1.0
    """

    fan_in: float = 0.0
    fan_out: float = 0.0
    depth: float = 0.0
    factor: float = 1.0

    def at(self, fan_in: float = 1, fan_out: float = 1, depth: float = 1) -> float:
        """Return the value at some fans and a depth."""
        return float(self.factor * fan_in**self.fan_in * fan_out**self.fan_out * depth**self.depth)

    def __str__(self) -> str:
        exponents = {"fan_in": self.fan_in, "fan_out": self.fan_out, "L": self.depth}
        numerator = [_power(name, e) for name, e in exponents.items() if e > 0]
        denominator = [_power(name, -e) for name, e in exponents.items() if e < 0]
        if self.factor != 1:
            numerator.insert(0, "sqrt(2)" if math.isclose(self.factor, math.sqrt(2)) else f"{self.factor:g}")
        divisor = f"({' '.join(denominator)})" if len(denominator) > 1 else "".join(denominator)
        return (" ".join(numerator) or "1") + (f" / {divisor}" if divisor else "")


def _power(name: str, exponent: float) -> str:
    if exponent == 0.5:
        return f"sqrt({name})"
    return name if exponent == 1 else f"{name}^{exponent:g}"


@dataclass(frozen=True)
class Rule:
    """The rule for one kind of position.

    Attributes:
        std: standard deviation of the initial entries; of several powers the smallest.
        sgd, adam: factors on the learning rate, for SGD and for optimizers that move every entry by about the learning
            rate.
    """

    std: tuple[Power, ...]
    sgd: Power
    adam: Power

    def __str__(self) -> str:
        std = str(self.std[0]) if len(self.std) == 1 else f"min({', '.join(map(str, self.std))})"
        return f"std {std}; sgd {self.sgd}; adam {self.adam}"


@dataclass(frozen=True)
class Scale:
    """A rule at one position, in numbers: standard deviation, factors on the learning rate."""

    std: float
    sgd: float
    adam: float

    @property
    def entry(self) -> float:
        """The size of an entry of the gradient, by which Adam divides and SGD does not."""
        return self.adam / self.sgd


@dataclass(frozen=True)
class Parametrization:
    """Rules for three kinds of positions, each by fans and depth.

    Embeddings, biases and gains read one number at a time, so they follow ``input`` (beside a readout, ``readout``)
    with a fan_in of 1. Convolutions count taps in fan_in. A matrix that is embedding and readout at once follows
    ``readout``, and so does every embedding of its width.

    Attributes:
        name: for tables.
        input: rule for parameters that read the data, tokens, or the constant 1.
        hidden: one rule for all matrices between, or one for each in order.
        readout: rule for parameters that write the outputs.
        source: paper and section.
        branch: of residual nets, your forward's factor on each branch, see :meth:`branch_multiplier`. All hidden
            matrices are taken to be on branches, L is their number, and biases and gains in blocks with them follow
            ``hidden``. ``None`` for other networks, where L is the number of all matrices.

    Example:
        >>> import torch
        >>> from spectral_monitor.scaling import MUP
        >>> net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
        >>> _ = torch.manual_seed(0)
        >>> MUP.init_(net)
        >>> round(net[2].weight.std().item() * 256, 1)
        1.0
        >>> optimizer = torch.optim.SGD(MUP.param_groups(net, lr=0.1, optimizer="sgd"))
        >>> [round(group["lr"], 4) for group in optimizer.param_groups]
        [0.4, 25.6, 0.0039, 1.0]
        >>> print(MUP)
        muP
          input    std 1 / sqrt(fan_in); sgd fan_out / fan_in; adam 1 / fan_in
          hidden   std 1 / sqrt(fan_in); sgd fan_out / fan_in; adam 1 / fan_in
          readout  std 1 / fan_in; sgd fan_out / fan_in; adam 1 / fan_in
    """

    name: str
    input: Rule
    hidden: Rule | tuple[Rule, ...]
    readout: Rule
    source: str = ""
    branch: Power | None = None

    def branch_multiplier(self, depth: int) -> float:
        """Return the factor on the output of each branch, before your forward adds it to the stream.

        Modules do not apply it, so this part of the parametrization is yours: ``x + multiplier * block(x)``. Any number
        in proportion to the depth will do, such as that of blocks instead of hidden matrices. It must be the same
        function of the depth at every depth.

        Args:
            depth: L, the number of hidden matrices, or of blocks.

        Raises:
            ValueError: a parametrization of networks without such branches, a depth below 1.

        Example:
            >>> from spectral_monitor.scaling import COMPLETE_P, DEPTH_MUP
            >>> COMPLETE_P.branch_multiplier(16), DEPTH_MUP.branch_multiplier(16)
            (0.0625, 0.25)
        """
        if self.branch is None:
            raise ValueError(f"{self.name} says nothing of residual branches: its networks have none")
        _check_depth(depth)
        return self.branch.at(depth=depth)

    def rule(self, kind: Kind, index: int = 1) -> Rule:
        """Return the rule for a kind of position; ``index`` counts the operators from 0.

        Raises:
            ValueError: an operator without a rule, as the parametrization is for a shallower network.
        """
        if kind != "hidden":
            return self.input if kind == "input" else self.readout
        if isinstance(self.hidden, Rule):
            return self.hidden
        if not 1 <= index <= len(self.hidden):
            raise ValueError(
                f"{self.name} has rules for {len(self.hidden)} hidden matrices after the first; there is no rule for "
                f"operator {index}"
            )
        return self.hidden[index - 1]

    def scale(self, position: LayerPosition, outputs: Outputs = "dense") -> Scale:
        """Return the rule of a position in numbers.

        With k outputs the gradient of the outputs has norm ``1 / sqrt(k)`` if they are dense, and 1 if they are sparse.
        So under sparse outputs a readout is drawn as if it had one output, and SGD takes the rate of one. The rate of
        Adam does not depend on the size of gradients.

        Source: The Feature Speed Formula, Table 1.
        """
        residual = self.branch is not None
        rule = self.rule("hidden" if residual and position.on_branch else position.kind, position.index)
        depth = position.branches if residual else position.depth
        fan_out = 1 if outputs == "sparse" and position.kind == "readout" else position.fan_out
        fans = (position.fan_in, fan_out, depth)
        adam = rule.adam.at(position.fan_in, position.fan_out, depth)
        return Scale(min(power.at(*fans) for power in rule.std), rule.sgd.at(*fans), adam)

    @torch.no_grad()
    def init_(
        self,
        module: nn.Module,
        *,
        scale: float = 1.0,
        outputs: Outputs = "dense",
        depth: int | None = None,
        roles: Mapping[str, str] | None = None,
        blocks: Mapping[str, int] | None = None,
    ) -> None:
        """Draw every matrix again, in place, from ``N(0, (scale std)^2)``, and set biases to zero.

        An embedding's ``padding_idx`` row becomes zero, too. Gains, and weights that are computed from others (weight
        norm), stay as they are. Numbers come from the global random state, as in ``torch.nn.init``.

        Args:
            module: any module, before it is sharded.
            scale: factor on all standard deviations; the root of 2 makes up for a ReLU.
            outputs: the kind of outputs, as for :meth:`param_groups`.
            depth: L in the formulas; by default counted, see :class:`Parametrization`.
            roles, blocks: pattern -> role or number of blocks, as for the monitor, where the guess is wrong.

        Raises:
            ValueError: a weight that is sharded over processes, by name; a pattern that does not fit; an operator
                without a rule; an invalid scale or depth; an unknown kind of outputs. Nothing is drawn then.
        """
        _check_outputs(outputs)
        if not 0 < scale < math.inf:
            raise ValueError(f"scale must be a finite number > 0, got {scale!r}")
        _check_depth(depth)
        layers = dissect(module, roles=roles, blocks=blocks).layers
        positions = by_parameter(module, layers, depth)
        refuse_spread(layers, ": draw the weights before the module is sharded")
        layers = tuple(layer for layer in layers if layer.compute is None)
        stds: dict[nn.Parameter, tuple[Layer, list[float]]] = {}  # before the first draw, for a rule may be missing
        for layer in layers:
            weight = layer.sources[0]
            if layer.is_matrix and weight not in stds:
                stds[weight] = layer, [scale * std for std in self._stds(layer, positions[id(weight)], outputs)]
        for weight, (layer, by_block) in stds.items():
            weight.normal_().mul_(by_entry(layer, weight, by_block))
        for layer in layers:
            weight = layer.sources[0]
            if not layer.is_matrix and BIAS.fullmatch(layer.info.name.rpartition(".")[2]):
                weight.zero_()
            padding = layer.module.padding_idx if isinstance(layer.module, (nn.Embedding, nn.EmbeddingBag)) else None
            if padding is not None:
                weight[padding].zero_()

    def _stds(self, layer: Layer, position: LayerPosition, outputs: Outputs) -> list[float]:
        """Return the standard deviation of each block of a matrix."""
        fan_outs = layer.layout.fan_outs
        sizes = [position.fan_out] * len(fan_outs) if len(set(fan_outs)) == 1 else fan_outs
        return [self.scale(replace(position, fan_out=size), outputs).std for size in sizes]

    def param_groups(
        self,
        module: nn.Module,
        lr: float | Tensor,
        optimizer: Family = "sgd",
        *,
        outputs: Outputs = "dense",
        depth: int | None = None,
        roles: Mapping[str, str] | None = None,
        blocks: Mapping[str, int] | None = None,
        weight_decay: float | None = None,
        eps: float | None = None,
    ) -> list[dict[str, Any]]:
        """Return groups for an optimizer, with ``lr`` times the factor of each parameter's position.

        Args:
            module: the model, or FSDP's wrapper around it.
            lr: the learning rate, right at every width once it is at one.
            optimizer: ``"sgd"``, or ``"adam"`` for those that move every entry by about the learning rate.
            outputs: ``"dense"`` if the loss is a mean over outputs, as the mean squared error is; ``"sparse"`` if few
                outputs of each sample matter, however many there are, as under cross entropy.
            depth: L in the formulas; by default counted, see :class:`Parametrization`.
            eps: that of Adam for gradients of size 1. In each group it is multiplied by the size of the gradient's
                entries in the parametrization, ``adam / sgd``. By default the optimizer's own, the same for all.
            roles, blocks, weight_decay: as in :func:`~spectral_monitor.spectral_param_groups`.

        Returns:
            A group for every factor, as :func:`~spectral_monitor.spectral_param_groups` does.

        Raises:
            ValueError: an unknown family or kind of outputs, a learning rate that is not a positive number, a depth
                below 1, ``eps`` for SGD or not a positive number, and arguments that that function refuses.
        """
        check_family(optimizer)
        if eps is not None and (optimizer != "adam" or not 0 < eps < math.inf):
            raise ValueError(f'eps must be a number > 0 and goes with optimizer="adam"; got {eps!r} and {optimizer!r}')
        _check_outputs(outputs)
        _check_depth(depth)
        return grouped(
            module,
            lr,
            lambda position: getattr(self.scale(position, outputs), optimizer),
            roles=roles,
            blocks=blocks,
            weight_decay=weight_decay,
            depth=depth,
            eps=None if eps is None else lambda position: eps * self.scale(position, outputs).entry,
        )

    def __str__(self) -> str:
        hidden = (self.hidden,) if isinstance(self.hidden, Rule) else self.hidden
        lines: Sequence[tuple[str, Rule]] = [("input", self.input), *(("hidden", r) for r in hidden)]
        branch = [] if self.branch is None else [f"  {'branch':<8} times {self.branch}"]
        return "\n".join([self.name, *(f"  {k:<8} {r}" for k, r in [*lines, ("readout", self.readout)]), *branch])


def _check_depth(depth: int | None) -> None:
    if depth is not None and not (isinstance(depth, int | float) and 1 <= depth < math.inf):
        raise ValueError(f"depth must be a number of matrices or blocks, >= 1, got {depth!r}")


def _check_outputs(outputs: str) -> None:
    if outputs not in get_args(Outputs):
        raise ValueError(f"unknown kind of outputs {outputs!r}; valid kinds: {', '.join(get_args(Outputs))}")
