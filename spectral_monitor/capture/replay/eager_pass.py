"""An eager pass beside the step: compiled code calls no hooks, so a few samples go through the same modules eagerly.

Its backward pass begins with the gradients that arrived in the step at the outputs of the outermost call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from spectral_monitor.capture.replay.batch_slicing import BatchSlice
from spectral_monitor.capture.replay.loss_flow import loss_in, tensors_in
from spectral_monitor.capture.row_sampling import GuardedTensor
from spectral_monitor.state.rng import AutocastState
from spectral_monitor.state.snapshot import in_place_of_forward

AUTOCAST_DECORATOR = "decorate_autocast"
"""Name of torch's wrapper around functions that are decorated with ``torch.autocast``."""


@contextmanager
def precisely(module: nn.Module) -> Iterator[None]:
    """Run a module inside without autocast and without compiled code; compiled code is neither made nor dropped."""
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(AutocastState.now(module).disabled().replayed())
        for part, forward in undecorated(module).items():
            stack.enter_context(in_place_of_forward(part, forward))
        yield


def undecorated(model: nn.Module) -> dict[nn.Module, Callable[..., Any]]:
    """Return each module whose ``forward`` is decorated with ``torch.autocast``, as Hugging Face's Trainer does, with
    the undecorated ``forward``.
    """
    forwards = {}
    for module in model.modules():
        function, undecorated_forward = module.forward, None
        while (inner := getattr(function, "__wrapped__", None)) is not None:
            code = getattr(function, "__code__", None)
            if code is not None and code.co_name == AUTOCAST_DECORATOR:
                undecorated_forward = inner
            function = inner
        if undecorated_forward is not None:
            bound = hasattr(undecorated_forward, "__self__")
            forwards[module] = undecorated_forward if bound else MethodType(undecorated_forward, module)
    return forwards


class OutputGradients:
    """Gradients that arrive at the tensors in the output of a call.

    Attributes:
        handles: of the hooks.

    Args:
        output: nested containers of tensors.
        arriving: called at each gradient; returns whether it belongs to the step.
    """

    def __init__(self, output: Any, arriving: Callable[[], bool]) -> None:
        self._arriving = arriving
        tensors = _distinct(output)
        self._gradients: list[GuardedTensor | None] = [None] * len(tensors)
        self.handles: list[RemovableHandle] = [
            x.register_hook(partial(self._keep, k)) for k, x in enumerate(tensors) if x.grad_fn is not None
        ]

    def _keep(self, k: int, gradient: Tensor | None) -> None:
        if gradient is None or not self._arriving():
            return
        guarded = self._gradients[k]
        earlier = None if guarded is None else guarded.get()
        self._gradients[k] = GuardedTensor(gradient if earlier is None else earlier + gradient)

    @property
    def arrived(self) -> bool:
        """True if a gradient has arrived."""
        return any(gradient is not None for gradient in self._gradients)

    def send(self, output: Any, portion: BatchSlice | None, arrivals: Sequence[Arrival]) -> None:
        """Run a backward pass with the gradients of the step, from a repeated call back to some outputs inside it.

        Args:
            output: of the repeated call, for the first samples of the batch or for all.
            portion: the first samples; ``None`` for all.
            arrivals: the outputs inside.

        Raises:
            ValueError: the call returned something else, or gradients were overwritten.
        """
        tensors = _distinct(output)
        if len(tensors) != len(self._gradients):
            raise ValueError(f"it returned {len(self._gradients)} tensors before and now returns {len(tensors)}")
        ends = []
        for x, guarded in zip(tensors, self._gradients, strict=True):
            if guarded is None:
                continue
            gradient = guarded.get()
            if gradient is None or x.grad_fn is None:
                raise ValueError(
                    "the gradients of its outputs were overwritten, or its outputs no longer depend on any weight"
                )
            ends.append((x, _part(gradient, x, portion).to(x)))
        _send(ends, arrivals)


class LossGradient:
    """The gradient of a training step's loss, with which the backward pass began."""

    def __init__(self, value: float) -> None:
        self.value = value

    def send(self, output: Any, portion: BatchSlice | None, arrivals: Sequence[Arrival]) -> None:
        """Run a backward pass from the loss in the output of the repeated step; see :meth:`OutputGradients.send`.

        Raises:
            ValueError: there is no loss.
        """
        loss = loss_in(output)
        if loss is None or loss.grad_fn is None:
            raise ValueError("training_step returns no loss")
        _send([(loss, _part(torch.full_like(loss, self.value), loss, portion))], arrivals)


def _send(ends: Sequence[tuple[Tensor, Tensor]], arrivals: Sequence[Arrival]) -> None:
    """Run a backward pass from pairs of a tensor and its gradient, back to some outputs in their graph."""
    by_edge = {arrival.edge[:2]: arrival for arrival in arrivals}
    for x, gradient in ends:
        # A tensor may be computed from another one. The gradient of the step is the sum over all its uses, so it
        # replaces what arrives from the others here.
        arrival = by_edge.get(get_gradient_edge(x)[:2]) or Arrival(x)
        arrival.known_gradient = gradient
    zeros = [torch.zeros_like(x) for x, _ in ends]
    torch.autograd.grad([x for x, _ in ends], [arrival.edge for arrival in arrivals], zeros, allow_unused=True)


class Arrival:
    """The edge of the graph at which the gradient of an output arrives, before hooks that are registered later.

    Attributes:
        known_gradient: replaces the gradient that arrives.
    """

    def __init__(self, output: Tensor) -> None:
        self.edge = get_gradient_edge(output)  # of the output itself, whatever is done to it in place
        self.known_gradient: Tensor | None = None
        output.register_hook(lambda arriving: self.known_gradient)


def _part(gradient: Tensor, output: Tensor, portion: BatchSlice | None) -> Tensor:
    """Return the part of a gradient that belongs to the output for a portion; of a mean over samples, its share.

    Raises:
        ValueError: the rows do not correspond to samples.
    """
    if gradient.shape == output.shape:
        return gradient * (portion.samples / portion.batch) if portion is not None and not output.ndim else gradient
    by_samples = portion is not None and output.ndim and len(gradient) * portion.samples == len(output) * portion.batch
    if not by_samples or gradient.shape[1:] != output.shape[1:]:
        raise ValueError(f"it returned shape {tuple(gradient.shape)} before and now returns {tuple(output.shape)}")
    return gradient[: len(output)]


def _distinct(output: Any) -> list[Tensor]:
    """Return the tensors in the output of a call, each once."""
    return list({id(x): x for x in tensors_in(output)}.values())
