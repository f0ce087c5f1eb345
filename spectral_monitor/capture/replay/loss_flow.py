"""Gradients around a loss that a call returned: they tell whether the backward pass began there, and only there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from spectral_monitor.linalg.kernel_products import nodes_before
from spectral_monitor.state.dtensor import is_distributed, local_part

MAX_ENTRIES = 4096
"""Entries of a gradient that are compared."""
MIN_SCALE = 128
"""Half precision multiplies losses by powers of two that are hardly ever smaller; nobody weights a loss like that."""


class LossFlow:
    """Gradients that reach a loss in the output of a call, and the other tensors in that output.

    A network may return a scalar that is only part of the loss, such as the commitment loss of a VQ-VAE beside its
    reconstruction. Then gradients reach the reconstruction by another way too. If the scalar is the full loss, the
    gradient of any other output (logits, hidden states) is the sum of those that the scalar's graph sends there. Both
    are compared, on some entries.

    Attributes:
        gradients: those that arrived at the loss; usually one.
        handles: of the hooks, on tensors and on nodes of the graph.

    ``loss``: in the output of the call, with its graph.
    """

    def __init__(self, loss: Tensor, output: Any) -> None:
        self.gradients: list[Tensor] = []
        self._arrived: dict[int, Tensor] = {}  # by number of another output
        self._sent: dict[int, Tensor] = {}  # by the loss's graph, likewise
        own = loss.grad_fn, loss.output_nr
        edges_of = ((x, (x.grad_fn, x.output_nr)) for x in tensors_in(output))
        others = {edge: x for x, edge in edges_of if x.grad_fn is not None and edge != own}
        number = {edge: i for i, edge in enumerate(others)}
        self.handles: list[RemovableHandle] = [loss.register_hook(self._begin)]
        self.handles += [x.register_hook(partial(self._arrive, number[edge])) for edge, x in others.items()]
        for node in nodes_before([loss.grad_fn]) if others else ():
            edges = {i: number[edge] for i, edge in enumerate(node.next_functions) if edge in number}
            if edges:
                self.handles.append(node.register_hook(partial(self._send, edges)))

    def _begin(self, gradient: Tensor | None) -> None:
        if gradient is not None:
            self.gradients.append(gradient.clone())

    def _arrive(self, number: int, gradient: Tensor | None) -> None:
        if gradient is not None:
            self._arrived[number] = _sampled(gradient)

    def _send(self, edges: Mapping[int, int], inputs: Sequence[Tensor | None], outputs: Any) -> None:
        """Add the gradients that a node of the loss's graph sends; ``inputs`` are the gradients of its inputs."""
        for i, number in edges.items():
            gradient = inputs[i]
            if gradient is not None:
                earlier, new = self._sent.get(number), _sampled(gradient)
                self._sent[number] = new if earlier is None else earlier + new

    def alone(self) -> Tensor:
        """Return whether all gradients came from the loss, as a tensor on its device, which is not waited for."""
        alone = self.gradients[0].new_ones((), dtype=torch.bool)
        for number, arrived in self._arrived.items():
            other = arrived - self._sent[number] if number in self._sent else arrived
            alone = alone & (other.norm() <= torch.finfo(arrived.dtype).eps ** 0.5 * arrived.norm()).to(alone.device)
        return alone

    def whole(self, accumulated: int, parts: int = 1, *, divided: bool = False) -> Tensor | bool:
        """Return whether the backward pass began at the loss, as it is or divided by ``accumulated``.

        The loss may be one of ``parts`` whose sum over processes is trained. Processes average gradients, so it was
        multiplied by ``parts`` before. ``divided``: whether it must have been divided.
        """
        if len(self.gradients) != 1:
            return False
        gradient = self.gradients[0]
        eps = 4 * torch.finfo(gradient.dtype).eps
        factor = gradient * (accumulated / parts)
        scaled = (factor >= MIN_SCALE) & (torch.frexp(factor.float()).mantissa == 0.5)
        is_divided = ((factor - 1).abs() <= eps) | scaled
        return self.alone() & (is_divided if divided else is_divided | ((gradient - 1).abs() <= eps))


def loss_in(output: Any) -> Tensor | None:
    """Return the loss in the output of a forward or a training step: a scalar, or the entry called ``loss``."""
    if isinstance(output, Tensor):
        is_loss = output.ndim == 0 and output.is_floating_point() and not is_distributed(output)
        return output if is_loss else None
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None and isinstance(output, tuple):
        scalars = [item for item in output if isinstance(item, Tensor) and loss_in(item) is not None]
        loss = scalars[0] if len(scalars) == 1 else None
    return loss_in(loss) if isinstance(loss, Tensor) else None


def _sampled(gradient: Tensor) -> Tensor:
    """Return a copy of some entries: the same ones for all gradients of a shape."""
    flat = local_part(gradient.detach()).reshape(-1)
    return flat[:: max(1, flat.numel() // MAX_ENTRIES)].clone()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in the output of a forward."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item)
    elif hasattr(value, "__dict__"):
        for item in vars(value).values():
            if isinstance(item, (Tensor, list, tuple)):
                yield from tensors_in(item)
