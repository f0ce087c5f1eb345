"""The outputs of layers in a forward that is run again with its graph, and passes through that graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.modules import module as hooked

from spectral_monitor.layers import Layer
from spectral_monitor.state.rng import RandomState


class Graph:
    """Layer index -> of each call the output and where in the graph it is; no edge where no graph leads to it.

    Attributes:
        outputs: copies, for what comes after a layer may work in place on what it returns.
        edges: where gradients of the outputs themselves arrive.
    """

    def __init__(self, copies: bool) -> None:
        """``copies``: whether the outputs are kept, or only their edges."""
        self._copies = copies
        self.outputs: dict[int, list[Tensor]] = {}
        self.edges: dict[int, list[GradientEdge | None]] = {}

    def add(self, i: int, given: Tensor | None, out: Tensor, layer: Layer) -> None:
        """Record one more call of layer ``i``."""
        self.edges.setdefault(i, []).append(get_gradient_edge(out) if out.requires_grad else None)
        if self._copies:
            self.outputs.setdefault(i, []).append(out.clone())


def sees_all_modules() -> str:
    """Return why passes through a graph would be noticed by somebody; empty if they would not."""
    everywhere = hooked._global_backward_hooks or hooked._global_backward_pre_hooks
    return "a backward hook on all modules would see the backward passes that it takes" if everywhere else ""


@contextmanager
def gradients_kept(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Inside, parameters have no gradients; afterwards they have those of before, whatever backward passes add."""
    gradients = [(p, p.grad) for p in parameters if p.is_leaf]
    try:
        for p, _ in gradients:
            p.grad = None
        yield
    finally:
        for p, gradient in gradients:
            p.grad = gradient


@contextmanager
def unseen(model: nn.Module, parameters: Iterable[Tensor]) -> Iterator[None]:
    """Inside, forwards build graphs, and passes through them call none of the backward hooks on modules and
    parameters, leave no gradients and draw no random numbers that are missed later.

    To be entered where modules are put back, hooks included: see :func:`~spectral_monitor.state.snapshot.preserved`.
    """
    watched: dict[int, Tensor] = {id(p): p for p in (*model.parameters(), *parameters)}
    hooks: list[tuple[Tensor, Any]] = []
    randomness = RandomState.now()
    try:
        for module in model.modules():
            module._backward_hooks.clear()
            module._backward_pre_hooks.clear()
        for p in watched.values():
            if p._backward_hooks:
                hooks.append((p, p._backward_hooks))
                p._backward_hooks = None
        with gradients_kept(watched.values()), torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for p, found in hooks:
            p._backward_hooks = found
        randomness.restore()
