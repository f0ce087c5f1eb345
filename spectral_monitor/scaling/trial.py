"""A network tried out on a few batches: the size of its features, and a step in which all layers contribute alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

import spectral_monitor.functional as F
from spectral_monitor.capture.row_sampling import first_tensor
from spectral_monitor.layers import Layer
from spectral_monitor.scaling.batches import loss_of
from spectral_monitor.state.rng import RandomState
from spectral_monitor.state.snapshot import Snapshot

Loss = Callable[[nn.Module, Any], Tensor]
"""``loss(module, batch)`` -> a scalar."""

Family = Literal["sgd", "normalized", "adam"]
FAMILIES: tuple[str, ...] = get_args(Family)

Blocks = dict[str, list[tuple[str, nn.Parameter]]]
"""Name -> named parameters that share a rate."""

SETTLED = 1e-4
"""Relative change of a factor, from one pass over the batches to the next, at which it is taken to be found."""

MAX_PASSES = 50
"""To find factors where a layer feeds itself; else no more are needed than there are layers."""

UNSURE = 0.01
"""Relative error by rounding at which a change of features is no longer believed."""


MAX_BYPASS = 0.1
"""Share of the loss decrease that may go another way than through what the readout is given."""


@dataclass(frozen=True)
class GradientPass:
    """Gradients on all batches."""

    loss: float  # mean over batches
    gradients: list[Tensor]  # of the parameters, in the order asked for; zero where the loss does not depend on one
    h: Tensor  # all that the readout was given, flat, float64
    b: Tensor  # the gradient of the loss with respect to it
    eps: float  # relative rounding error of ``h``


class Trial:
    """A module and some batches; every pass over them begins from the same random state, buffers and batches.

    Who makes a trial puts the module and the random state back afterwards.
    """

    def __init__(self, module: nn.Module, batches: Sequence[Any], loss: Loss | None) -> None:
        self.module = module
        self.batches = batches
        self._loss = loss
        self._random = RandomState.now()
        self._state, self._inputs = Snapshot(module, weights=False), Snapshot(batches)
        self._state.restore()  # the first time takes away new hooks; ours come later
        self.batch = 0

    def losses(self) -> Iterator[Tensor]:
        """Return the loss of every batch.

        Raises:
            TypeError: it is not a scalar tensor.
        """
        self._state.restore()
        self._inputs.restore()
        self._random.restore()
        for i, batch in enumerate(self.batches):
            self.batch = i
            loss = loss_of(self.module, batch, i) if self._loss is None else self._loss(self.module, batch)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
                raise TypeError(
                    f"the loss of a batch must be a scalar tensor, got {what}: of module.training_step(batch, i) if "
                    "there is one, else module(*batch); or give loss=, a function of module and batch"
                )
            yield loss.reshape(())

    @torch.no_grad()
    def forward_factors(self, layers: Sequence[Layer]) -> dict[nn.Parameter, float]:
        """Return, for each weight in order of execution, the factor with which its layers' outputs have RMS 1.

        Outputs are divided by their RMS while the pass goes on, so that of one batch a single pass is exact. Over
        several batches, and where a layer is called again, the first layer is exact after one pass, the second after
        two, and so on; mostly a few passes settle all.

        Raises:
            ValueError: outputs that are zero or not finite, a layer that is not called, sizes that do not settle.
        """
        sums: dict[nn.Parameter, dict[tuple[int, int], tuple[float, int]]] = {}
        calls: dict[tuple[nn.Parameter, int], int] = {}
        factors: dict[nn.Parameter, float] = {}

        def rescale(layer: Layer, module: nn.Module, args: Any, output: Tensor) -> Tensor:
            """Return outputs times the factor that makes those of all calls of a weight have RMS 1; note it."""
            weight = layer.sources[0]
            call = calls[weight, self.batch] = calls.get((weight, self.batch), 0) + 1
            size = float(F.feature_rms(output))
            if not 0 < size < math.inf:
                raise ValueError(
                    f"{layer.info.name!r} puts out features of RMS {size} on batch {self.batch}: there is no factor "
                    "that makes it 1"
                )
            seen = sums.setdefault(weight, {})
            seen[self.batch, call] = size**2 * output.numel(), output.numel()
            total, count = (sum(column) for column in zip(*seen.values(), strict=True))
            factors[weight] = math.sqrt(count / total)
            return output * factors[weight]

        with ExitStack() as hooks:
            for layer in layers:
                if layer.module is not None:
                    hooks.enter_context(layer.module.register_forward_hook(partial(rescale, layer)))
            for _ in range(max(MAX_PASSES, len(layers) + 2)):
                before = dict(factors)
                calls.clear()
                for _ in self.losses():
                    pass
                changes = {weight: abs(math.log(now / before.get(weight, math.nan))) for weight, now in factors.items()}
                if all(change < SETTLED for change in changes.values()):
                    break
            else:
                moving = [layer.info.name for layer in layers if not changes[layer.sources[0]] < SETTLED]
                raise ValueError(f"the size of features does not settle, those of {', '.join(moving)}")
        for layer in layers:
            if layer.sources[0] not in factors:
                raise ValueError(f"{layer.info.name!r} is not called on any of the {len(self.batches)} batches")
        return factors

    @contextmanager
    def _given(self, readout: Layer) -> Iterator[list[Tensor]]:
        """Inside, the inputs of a layer's module are collected."""
        assert readout.module is not None
        inputs: list[Tensor] = []

        def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
            given = first_tensor(args) if args else first_tensor(kwargs)
            if given is not None:
                inputs.append(given)

        with readout.module.register_forward_pre_hook(keep, with_kwargs=True):
            yield inputs

    @torch.enable_grad()
    def look(self, readout: Layer, parameters: Sequence[nn.Parameter]) -> GradientPass:
        """Return losses and gradients on all batches.

        Raises:
            ValueError: the readout is not called, what it is given does not depend on trained weights or is rounded
                too much.
        """
        total, h, b, eps = 0.0, [], [], 0.0
        gradients = [torch.zeros_like(parameter) for parameter in parameters]
        with self._given(readout) as inputs:
            for loss in self.losses():
                if not inputs or not all(given.requires_grad for given in inputs):
                    what = "is given what no trained weight leads to" if inputs else "is not called"
                    raise ValueError(f"the readout, {readout.info.name!r}, {what} on batch {self.batch}")
                mean = loss / len(self.batches)
                found = torch.autograd.grad(mean, [*parameters, *inputs], materialize_grads=True)
                for gradient, more in zip(gradients, found[: len(parameters)], strict=True):
                    gradient += more
                for given, more in zip(inputs, found[len(parameters) :], strict=True):
                    h.append(given.detach().double().flatten())
                    b.append(more.double().flatten())
                    eps = torch.finfo(given.dtype).eps
                    if math.sqrt(eps) > UNSURE:
                        raise ValueError(
                            f"the readout, {readout.info.name!r}, is given {given.dtype}, too coarse to see what a "
                            "small step changes: calibrate in float32 or float64, without autocast"
                        )
                total += mean.item()
                inputs.clear()
        return GradientPass(total, gradients, torch.cat(h), torch.cat(b), eps)

    @torch.no_grad()
    def velocity(
        self, readout: Layer, look: GradientPass, parameters: Sequence[nn.Parameter], direction: Sequence[Tensor]
    ) -> Tensor:
        """Return how the readout's inputs move per unit of a small step along ``direction``, by central differences.

        Raises:
            ValueError: it does not move by more than rounding does.
        """
        before = [parameter.detach().clone() for parameter in parameters]

        def given(length: float) -> Tensor:
            """Return the readout's inputs so far along the direction."""
            for parameter, start, along in zip(parameters, before, direction, strict=True):
                parameter.copy_(start.add(along, alpha=length))
            with self._given(readout) as inputs:
                for _ in self.losses():
                    pass
            return torch.cat([x.double().flatten() for x in inputs])

        def shifted(length: float, least: float) -> tuple[Tensor, float]:
            """Return half of what two opposite steps change, and its size relative to the inputs."""
            half = (given(length) - given(-length)) / 2
            change = _norm(half) / _norm(look.h)
            if not math.isfinite(change) or change * UNSURE < least:
                raise ValueError(
                    f"what the readout, {readout.info.name!r}, is given changes by {change:.1e} of its size, too "
                    f"little for features rounded to {look.eps:.1e}"
                )
            return half, change

        target = math.sqrt(look.eps)
        sizes = [(_norm(start), _norm(along)) for start, along in zip(before, direction, strict=True)]
        length = target * min((size / along for size, along in sizes if along > 0 and size > 0), default=1.0)
        try:
            _, change = shifted(length, least=0.0)
            length *= target / max(change, look.eps * UNSURE)
            moved, _ = shifted(length, least=look.eps)
        finally:
            for parameter, start in zip(parameters, before, strict=True):
                parameter.copy_(start)
        return moved / length


@dataclass(frozen=True)
class EqualContributionStep:
    """A step in which all blocks contribute alike."""

    loss: float  # before it
    rates: list[float]  # of the blocks
    decrease: float  # what all contribute
    angle: float  # of what the readout is given
    sensitivity: float  # the same


def update_of(gradients: Sequence[Tensor], optimizer: Family) -> list[Tensor]:
    """Return a block's first update per unit of learning rate."""
    if optimizer == "adam":
        return [-g.sign() for g in gradients]
    size = _norm(torch.cat([g.flatten() for g in gradients])) if optimizer == "normalized" else 1.0
    return [g / -size for g in gradients]


def equal_contributions(trial: Trial, readout: Layer, blocks: Blocks, optimizer: Family) -> EqualContributionStep:
    """Return the step whose ``L`` blocks contribute ``1 / L`` each (Eq. 8).

    Raises:
        ValueError: a block without gradient; signal that passes by what the readout is given; see :class:`Trial`.
    """
    parameters = [parameter for members in blocks.values() for _, parameter in members]
    look = trial.look(readout, parameters)
    gradient_of = dict(zip(parameters, look.gradients, strict=True))
    by_block = {block: [gradient_of[p] for _, p in members] for block, members in blocks.items()}
    order = 1 if optimizer == "adam" else 2
    sizes = {block: _norm(torch.cat([g.flatten() for g in some]), order) for block, some in by_block.items()}
    rates, updates, before, decrease = [], [], 0.0, 0.0
    for block, gradients in by_block.items():
        size = sizes[block]
        if not 10 * look.eps * max(sizes.values()) < size < math.inf:
            raise ValueError(
                f"{block!r} has no learning rate with which it contributes: its gradient on these batches is "
                f"{'zero up to rounding' if math.isfinite(size) else 'not finite'}; requires_grad_(False) takes it out"
            )
        rate = 1 / (len(blocks) * size**2) if optimizer == "sgd" else 1 / (len(blocks) * size)
        update = [rate * along for along in update_of(gradients, optimizer)]
        share = sum(float(F.contribution(g, dW)) for g, dW in zip(gradients, update, strict=True))
        decrease += share
        if all(parameter is not readout.sources[0] for _, parameter in blocks[block]):
            before += share
        rates.append(rate)
        updates += update
    velocity = trial.velocity(readout, look, parameters, updates)
    carried = float(F.contribution(look.b, velocity)) / before if before else math.nan
    if not abs(carried - 1) < MAX_BYPASS:
        raise ValueError(
            f"what the readout, {readout.info.name!r}, is given carries {carried:.2f} of the loss decrease of the "
            "weights before it: not all signal passes there (Theorem 2.1 needs that). Is another layer the readout?"
        )
    angle, sensitivity = F.backward_feature_angle(velocity, look.b), F.sensitivity(velocity, look.b)
    return EqualContributionStep(look.loss, rates, decrease, float(angle), float(sensitivity))


def _norm(tensor: Tensor, order: float = 2) -> float:
    return float(torch.linalg.vector_norm(tensor.double(), ord=order))
