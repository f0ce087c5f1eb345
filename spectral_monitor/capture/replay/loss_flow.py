"""The flow of gradients from a loss that a call returned: did the backward pass begin there, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from spectral_monitor.linalg.kernel_products import nodes_before
from spectral_monitor.state.dtensor import is_distributed, local_part

SAMPLE = 4096
"""Entries of a gradient that are compared."""
SCALE = 128
"""Half precision multiplies losses by powers of two that are hardly ever smaller; nobody weights a loss like that."""


class LossFlow:
    """Gradients that reach what a call returned, beside those that come from the loss in it.

    A network may return a scalar that is part of the loss only, such as the commitment loss of a VQ-VAE beside its
    reconstruction: then gradients reach the reconstruction too, and not through that scalar. Where the scalar is the
    whole loss, the gradient of any other output (logits, hidden states) is the sum of those that the scalar's own graph
    sends there. Both are compared, on some entries.

    Attributes:
        gradients: that arrived at the loss: one, if all is well.
        handles: of the hooks, on tensors and on nodes of the graph.

    Args:
        loss: in what the call returned, with its graph.
        output: all that it returned.
    """

    def __init__(self, loss: Tensor, output: Any) -> None:
        self.gradients: list[Tensor] = []
        self._arrived: dict[int, Tensor] = {}
        self._sent: dict[int, Tensor] = {}
        own = loss.grad_fn, loss.output_nr
        others = {(o.grad_fn, o.output_nr): o for o in tensors_in(output) if o.grad_fn is not None}
        others = {edge: other for edge, other in others.items() if edge != own}
        number = {edge: i for i, edge in enumerate(others)}
        self.handles: list[RemovableHandle] = [loss.register_hook(self._begin)]
        self.handles += [other.register_hook(partial(self._arrive, number[edge])) for edge, other in others.items()]
        for node in nodes_before([loss.grad_fn]) if others else ():
            edges = {i: number[edge] for i, edge in enumerate(node.next_functions) if edge in number}
            if edges:
                self.handles.append(node.register_hook(partial(self._send, edges)))

    def _begin(self, gradient: Tensor | None) -> None:
        if gradient is not None:
            self.gradients.append(gradient.clone())

    def _arrive(self, which: int, gradient: Tensor | None) -> None:
        if gradient is not None:
            self._arrived[which] = _some(gradient)

    def _send(self, edges: Mapping[int, int], inputs: Sequence[Tensor | None], outputs: Any) -> None:
        """Add what a node of the loss's graph sends along its edges; ``inputs`` are the gradients of its inputs."""
        for i, which in edges.items():
            gradient = inputs[i]
            if gradient is not None:
                sent, more = self._sent.get(which), _some(gradient)
                self._sent[which] = more if sent is None else sent + more

    def alone(self) -> Tensor:
        """Return whether no gradient came from elsewhere, on the loss's device, without waiting for it."""
        whole = self.gradients[0].new_ones((), dtype=torch.bool)
        for which, arrived in self._arrived.items():
            rest = arrived - self._sent[which] if which in self._sent else arrived
            whole = whole & (rest.norm() <= torch.finfo(arrived.dtype).eps ** 0.5 * arrived.norm()).to(whole.device)
        return whole

    def whole(self, accumulated: int, parts: int = 1, *, divided: bool = False) -> Tensor | bool:
        """Return whether the backward pass began at the loss, as it is or divided by ``accumulated``.

        Where the loss is one of ``parts`` that are summed over processes, which take the mean of their gradients, it
        was multiplied by ``parts`` beforehand. ``divided``: whether it must have been divided.
        """
        if len(self.gradients) != 1:
            return False
        gradient = self.gradients[0]
        eps = 4 * torch.finfo(gradient.dtype).eps
        times = gradient * (accumulated / parts)
        scaled = (times >= SCALE) & (torch.frexp(times.float()).mantissa == 0.5)
        begun = ((times - 1).abs() <= eps) | scaled
        return self.alone() & (begun if divided else begun | ((gradient - 1).abs() <= eps))


def loss_in(output: Any) -> Tensor | None:
    """Return the loss in what a forward or a training step returns: a scalar, or the entry called ``loss``."""
    if isinstance(output, Tensor):
        known = output.ndim == 0 and output.is_floating_point() and not is_distributed(output)
        return output if known else None
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if named is None and isinstance(output, tuple):
        scalars = [item for item in output if isinstance(item, Tensor) and loss_in(item) is not None]
        named = scalars[0] if len(scalars) == 1 else None
    return loss_in(named) if isinstance(named, Tensor) else None


def _some(gradient: Tensor) -> Tensor:
    """Return a copy of some entries, the same ones of any gradient of that shape."""
    flat = local_part(gradient.detach()).reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLE)].clone()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in what a forward returns."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item)
    elif hasattr(value, "__dict__"):
        for item in vars(value).values():
            if isinstance(item, (Tensor, list, tuple)):
                yield from tensors_in(item)
