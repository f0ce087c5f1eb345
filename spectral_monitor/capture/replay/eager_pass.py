"""A pass beside the step: compiled code calls no hooks, so a few samples go through the same modules eagerly.

Its gradients begin where those of the step arrived: at what the outermost call returned.
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
"""The function of torch's that calls a decorated one under autocast; decorated ones are told by it."""


@contextmanager
def precisely(module: nn.Module) -> Iterator[None]:
    """Inside, a module computes without autocast, and what is compiled as if it were not.

    No graph is made, and none is dropped.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(AutocastState.now(module).disabled().replayed())
        for part, forward in undecorated(module).items():
            stack.enter_context(in_place_of_forward(part, forward))
        yield


def undecorated(model: nn.Module) -> dict[nn.Module, Callable[..., Any]]:
    """Return the modules whose ``forward`` is decorated with ``torch.autocast``, as Hugging Face's Trainer does it, and
    what is decorated.
    """
    found = {}
    for module in model.modules():
        outer, inner = module.forward, None
        while (below := getattr(outer, "__wrapped__", None)) is not None:
            code = getattr(outer, "__code__", None)
            inner = below if code is not None and code.co_name == AUTOCAST_DECORATOR else inner
            outer = below
        if inner is not None:
            found[module] = inner if hasattr(inner, "__self__") else MethodType(inner, module)
    return found


class OutputGradients:
    """Gradients that arrive at the tensors a call returned.

    Attributes:
        handles: of the hooks.

    Args:
        output: what the call returned, in nested containers.
        arriving: called at each gradient; whether it is one of the step's.
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
        before = self._gradients[k]
        there = None if before is None else before.get()
        self._gradients[k] = GuardedTensor(gradient if there is None else there + gradient)

    @property
    def arrived(self) -> bool:
        """True if there was any."""
        return any(gradient is not None for gradient in self._gradients)

    def send(self, output: Any, portion: BatchSlice | None, arrivals: Sequence[Arrival]) -> None:
        """Send the gradients of the step through what the same call returned once more, as far as some outputs.

        Args:
            output: of the call for the first samples of the batch, or for all of it.
            portion: which those are; ``None`` for all.
            arrivals: those outputs.

        Raises:
            ValueError: the call returned something else, or gradients were overwritten.
        """
        tensors = _distinct(output)
        if len(tensors) != len(self._gradients):
            raise ValueError(f"it returns {len(tensors)} tensors, and returned {len(self._gradients)} before")
        ends = []
        for x, guarded in zip(tensors, self._gradients, strict=True):
            if guarded is None:
                continue
            gradient = guarded.get()
            if gradient is None or x.grad_fn is None:
                raise ValueError("gradients of what it returned were overwritten, or lead nowhere now")
            ends.append((x, _part(gradient, x, portion).to(x)))
        _send(ends, arrivals)


class LossGradient:
    """The gradient that the backward pass began with, at the loss that a training step returned.

    Attributes:
        value: of the gradient.
    """

    def __init__(self, value: float) -> None:
        self.value = value

    def send(self, output: Any, portion: BatchSlice | None, arrivals: Sequence[Arrival]) -> None:
        """Send it through the loss in what the same step returned once more; see :meth:`OutputGradients.send`.

        Raises:
            ValueError: there is no loss.
        """
        loss = loss_in(output)
        if loss is None or loss.grad_fn is None:
            raise ValueError("training_step returns no loss")
        _send([(loss, _part(torch.full_like(loss, self.value), loss, portion))], arrivals)


def _send(ends: Sequence[tuple[Tensor, Tensor]], arrivals: Sequence[Arrival]) -> None:
    """Send gradients from tensors, each given with its own, as far as some outputs in their graph."""
    known = {arrival.place: arrival for arrival in arrivals}
    for x, gradient in ends:
        # One may have been computed from another. What arrives at each is given, and takes the place of what the others
        # send it here.
        end = known.get((x.grad_fn, x.output_nr)) or Arrival(x)
        end.given = gradient
    nothing = [torch.zeros_like(x) for x, _ in ends]
    torch.autograd.grad([x for x, _ in ends], [arrival.edge for arrival in arrivals], nothing, allow_unused=True)


class Arrival:
    """Place where the gradient of an output arrives, before whoever registers a hook there later.

    Attributes:
        given: that gradient, if it is known; it takes the place of what arrives.
    """

    def __init__(self, output: Tensor) -> None:
        self.edge = get_gradient_edge(output)  # of the output itself, whatever is done to it in place
        self.place = output.grad_fn, output.output_nr
        self.given: Tensor | None = None
        output.register_hook(lambda arriving: self.given)


def _part(gradient: Tensor, now: Tensor, portion: BatchSlice | None) -> Tensor:
    """Return the gradient of what is there of an output; that of a mean over samples is shared out among them.

    Raises:
        ValueError: of which samples its rows are cannot be told.
    """
    if gradient.shape == now.shape:
        return gradient * (portion.samples / portion.batch) if portion is not None and not now.ndim else gradient
    whole = portion is not None and now.ndim and len(gradient) * portion.samples == len(now) * portion.batch
    if not whole or gradient.shape[1:] != now.shape[1:]:
        raise ValueError(f"it returns {tuple(now.shape)}, and returned {tuple(gradient.shape)} before")
    return gradient[: len(now)]


def _distinct(output: Any) -> list[Tensor]:
    """Return the tensors in what a call returned, each once."""
    return list({id(x): x for x in tensors_in(output)}.values())
