"""A network on a few batches: the size of its features, and a step to which all layers contribute the same share."""

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

MAX_FACTOR_CHANGE = 1e-4
"""A factor is final once it changes by less, relatively, from one pass over the batches to the next."""

MAX_PASSES = 50
"""Passes to find factors where a layer feeds itself; otherwise as many as there are layers suffice."""

MAX_ROUNDING_ERROR = 0.01
"""Relative error by rounding above which a change of features is refused."""

MAX_BYPASS = 0.1
"""Share of the loss decrease that may bypass the inputs of the readout."""


@dataclass(frozen=True)
class GradientPass:
    """Gradients on all batches."""

    loss: float  # mean over batches
    gradients: list[Tensor]  # of the parameters, in their order; zero where the loss does not depend on one
    h: Tensor  # all inputs of the readout, flat, float64
    b: Tensor  # gradient of the loss with respect to them
    eps: float  # relative rounding error of ``h``


class Trial:
    """A module and some batches; every pass over them begins from the same random state, buffers and batches.

    The caller restores the module and the random state afterwards.
    """

    def __init__(self, module: nn.Module, batches: Sequence[Any], loss: Loss | None) -> None:
        self.module = module
        self.batches = batches
        self._loss = loss
        self._random = RandomState.now()
        self._state, self._inputs = Snapshot(module, weights=False), Snapshot(batches)
        self._state.restore()  # the first call removes new hooks; ours come later
        self._batch_index = 0

    def losses(self) -> Iterator[Tensor]:
        """Yield the loss of each batch.

        Raises:
            TypeError: it is not a scalar tensor.
        """
        self._state.restore()
        self._inputs.restore()
        self._random.restore()
        for i, batch in enumerate(self.batches):
            self._batch_index = i
            loss = loss_of(self.module, batch, i) if self._loss is None else self._loss(self.module, batch)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
                raise TypeError(
                    f"the loss of a batch must be a scalar tensor, got {kind}: it is module.training_step(batch, i) if "
                    "that exists, else module(*batch), or set loss= to a function of module and batch"
                )
            yield loss.reshape(())

    @torch.no_grad()
    def forward_factors(self, layers: Sequence[Layer]) -> dict[nn.Parameter, float]:
        """Return, for each weight in order of execution, the factor that gives its layers' outputs RMS 1.

        Outputs are divided by their RMS during the pass, so that one pass is exact for one batch. Over several
        batches, and where a layer is called again, the first layer is exact after one pass, the second after two, and
        so on; mostly a few passes are enough.

        Raises:
            ValueError: outputs that are zero or not finite, a layer that is not called, sizes that do not settle.
        """
        # weight -> (batch, call) -> sum of squares and number of the outputs' entries
        sums: dict[nn.Parameter, dict[tuple[int, int], tuple[float, int]]] = {}
        calls: dict[tuple[nn.Parameter, int], int] = {}  # (weight, batch) -> calls in the present pass
        factors: dict[nn.Parameter, float] = {}

        def rescale(layer: Layer, module: nn.Module, args: Any, output: Tensor) -> Tensor:
            """Record and apply the factor that gives the outputs of all calls of a weight RMS 1."""
            weight = layer.sources[0]
            call = calls[weight, self._batch_index] = calls.get((weight, self._batch_index), 0) + 1
            size = float(F.feature_rms(output))
            if not 0 < size < math.inf:
                raise ValueError(
                    f"the outputs of {layer.info.name!r} have RMS {size} on batch {self._batch_index}: no factor makes "
                    "it 1"
                )
            weight_sums = sums.setdefault(weight, {})
            weight_sums[self._batch_index, call] = size**2 * output.numel(), output.numel()
            total, count = (sum(column) for column in zip(*weight_sums.values(), strict=True))
            factors[weight] = math.sqrt(count / total)
            return output * factors[weight]

        with ExitStack() as hooks:
            for layer in layers:
                if layer.module is not None:
                    hooks.enter_context(layer.module.register_forward_hook(partial(rescale, layer)))
            for _ in range(max(MAX_PASSES, len(layers) + 2)):
                previous = dict(factors)
                calls.clear()
                for _ in self.losses():
                    pass
                changes = {w: abs(math.log(factor / previous.get(w, math.nan))) for w, factor in factors.items()}
                if all(change < MAX_FACTOR_CHANGE for change in changes.values()):
                    break
            else:
                unsettled = [layer.info.name for layer in layers if not changes[layer.sources[0]] < MAX_FACTOR_CHANGE]
                raise ValueError(f"the size of features does not settle, those of {', '.join(unsettled)}")
        for layer in layers:
            if layer.sources[0] not in factors:
                raise ValueError(f"{layer.info.name!r} is not called on any of the {len(self.batches)} batches")
        return factors

    @contextmanager
    def _recorded_inputs(self, readout: Layer) -> Iterator[list[Tensor]]:
        """Collect the inputs of the readout's module in a list."""
        assert readout.module is not None
        inputs: list[Tensor] = []

        def record(module: nn.Module, args: Any, kwargs: Any) -> None:
            features = first_tensor(args or kwargs)
            if features is not None:
                inputs.append(features)

        with readout.module.register_forward_pre_hook(record, with_kwargs=True):
            yield inputs

    @torch.enable_grad()
    def gradient_pass(self, readout: Layer, parameters: Sequence[nn.Parameter]) -> GradientPass:
        """Return the mean loss and its gradients on all batches.

        Raises:
            ValueError: the readout is not called; its inputs do not depend on trained weights or are rounded too much.
        """
        total, h, b, eps = 0.0, [], [], 0.0
        gradients = [torch.zeros_like(parameter) for parameter in parameters]
        with self._recorded_inputs(readout) as inputs:
            for loss in self.losses():
                if not inputs or not all(features.requires_grad for features in inputs):
                    problem = "has inputs that depend on no trained weight" if inputs else "is not called"
                    raise ValueError(f"the output layer, {readout.info.name!r}, {problem} on batch {self._batch_index}")
                mean = loss / len(self.batches)
                batch_gradients = torch.autograd.grad(mean, [*parameters, *inputs], materialize_grads=True)
                for gradient, part in zip(gradients, batch_gradients[: len(parameters)], strict=True):
                    gradient += part
                for features, part in zip(inputs, batch_gradients[len(parameters) :], strict=True):
                    h.append(features.detach().double().flatten())
                    b.append(part.double().flatten())
                    eps = torch.finfo(features.dtype).eps
                    if math.sqrt(eps) > MAX_ROUNDING_ERROR:
                        raise ValueError(
                            f"the inputs of the output layer, {readout.info.name!r}, are {features.dtype}, too coarse "
                            "to show what a small step changes: calibrate in float32 or float64, without autocast"
                        )
                total += mean.item()
                inputs.clear()
        return GradientPass(total, gradients, torch.cat(h), torch.cat(b), eps)

    @torch.no_grad()
    def velocity(
        self, readout: Layer, gradients: GradientPass, parameters: Sequence[nn.Parameter], directions: Sequence[Tensor]
    ) -> Tensor:
        """Return the change of the readout's inputs per unit of a small step along the directions of the parameters.

        Raises:
            ValueError: the change is not larger than rounding errors.
        """
        origins = [parameter.detach().clone() for parameter in parameters]

        def inputs_at(length: float) -> Tensor:
            """Return the readout's inputs after a step of this length."""
            for parameter, origin, direction in zip(parameters, origins, directions, strict=True):
                parameter.copy_(origin.add(direction, alpha=length))
            with self._recorded_inputs(readout) as inputs:
                for _ in self.losses():
                    pass
            return _flat(inputs).double()

        def central_difference(length: float, min_change: float) -> tuple[Tensor, float]:
            """Return half the difference between two opposite steps, and its size relative to the inputs."""
            difference = (inputs_at(length) - inputs_at(-length)) / 2
            change = _norm(difference) / _norm(gradients.h)
            if not math.isfinite(change) or change * MAX_ROUNDING_ERROR < min_change:
                raise ValueError(
                    f"the inputs of the output layer, {readout.info.name!r}, change by {change:.1e} of their size, too "
                    f"little for features rounded to {gradients.eps:.1e}"
                )
            return difference, change

        target = math.sqrt(gradients.eps)
        sizes = [(_norm(origin), _norm(direction)) for origin, direction in zip(origins, directions, strict=True)]
        length = target * min((weight / step for weight, step in sizes if step > 0 and weight > 0), default=1.0)
        try:
            _, change = central_difference(length, min_change=0.0)
            length *= target / max(change, gradients.eps * MAX_ROUNDING_ERROR)
            difference, _ = central_difference(length, min_change=gradients.eps)
        finally:
            for parameter, origin in zip(parameters, origins, strict=True):
                parameter.copy_(origin)
        return difference / length


@dataclass(frozen=True)
class EqualContributionStep:
    """A step to which all blocks contribute the same share."""

    loss: float  # before the step
    rates: list[float]  # learning rate of each block
    decrease: float  # first-order decrease of the loss by all blocks
    angle: float  # backward-feature angle of the readout's inputs
    sensitivity: float  # of the readout's inputs


def update_of(gradients: Sequence[Tensor], optimizer: Family) -> list[Tensor]:
    """Return a block's first update per unit of learning rate."""
    if optimizer == "adam":
        return [-g.sign() for g in gradients]
    size = _norm(_flat(gradients)) if optimizer == "normalized" else 1.0
    return [g / -size for g in gradients]


def equal_contributions(trial: Trial, readout: Layer, blocks: Blocks, optimizer: Family) -> EqualContributionStep:
    """Return the step whose ``L`` blocks contribute ``1 / L`` each (Eq. 8).

    Raises:
        ValueError: a block without gradient; signal that bypasses the readout's inputs; see :class:`Trial`.
    """
    parameters = [parameter for members in blocks.values() for _, parameter in members]
    gradient_pass = trial.gradient_pass(readout, parameters)
    gradient_of = dict(zip(parameters, gradient_pass.gradients, strict=True))
    by_block = {block: [gradient_of[p] for _, p in members] for block, members in blocks.items()}
    order = 1 if optimizer == "adam" else 2
    sizes = {block: _norm(_flat(gradients), order) for block, gradients in by_block.items()}
    rates, updates, decrease = [], [], 0.0
    decrease_before_readout = 0.0
    for block, gradients in by_block.items():
        size = sizes[block]
        if not 10 * gradient_pass.eps * max(sizes.values()) < size < math.inf:
            raise ValueError(
                f"{block!r} has no learning rate with which it contributes: its gradient on these batches is "
                f"{'zero up to rounding' if math.isfinite(size) else 'not finite'}; requires_grad_(False) takes it out"
            )
        rate = 1 / (len(blocks) * size**2) if optimizer == "sgd" else 1 / (len(blocks) * size)
        update = [rate * direction for direction in update_of(gradients, optimizer)]
        share = sum(float(F.contribution(g, dW)) for g, dW in zip(gradients, update, strict=True))
        decrease += share
        if all(parameter is not readout.sources[0] for _, parameter in blocks[block]):
            decrease_before_readout += share
        rates.append(rate)
        updates += update
    velocity = trial.velocity(readout, gradient_pass, parameters, updates)
    through_inputs = float(F.contribution(gradient_pass.b, velocity))
    share_carried = through_inputs / decrease_before_readout if decrease_before_readout else math.nan
    if not abs(share_carried - 1) < MAX_BYPASS:
        raise ValueError(
            f"the inputs of the output layer, {readout.info.name!r}, carry {share_carried:.2f} of the loss decrease of "
            "the weights before it: not all signal passes through it, as Theorem 2.1 requires. Is another layer the "
            "output layer?"
        )
    angle = float(F.backward_feature_angle(velocity, gradient_pass.b))
    return EqualContributionStep(
        gradient_pass.loss, rates, decrease, angle, float(F.sensitivity(velocity, gradient_pass.b))
    )


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _norm(tensor: Tensor, order: float = 2) -> float:
    return float(torch.linalg.vector_norm(tensor.double(), ord=order))
