"""Outputs of layers in a repeated forward with its graph, and backward passes through that graph."""

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
    """The outputs of layers and their edges in the graph, by layer index, one for each call.

    Attributes:
        outputs: copies, because the next layer may change an output in place.
        edges: where gradients of the outputs arrive; ``None`` for outputs without a graph.
    """

    def __init__(self, copies: bool) -> None:
        """``copies``: whether to keep outputs, or only their edges."""
        self._copies = copies
        self.outputs: dict[int, list[Tensor]] = {}
        self.edges: dict[int, list[GradientEdge | None]] = {}

    def add(self, i: int, x: Tensor | None, out: Tensor, layer: Layer) -> None:
        """Record one more call of layer ``i``."""
        self.edges.setdefault(i, []).append(get_gradient_edge(out) if out.requires_grad else None)
        if self._copies:
            self.outputs.setdefault(i, []).append(out.clone())


def sees_all_modules() -> str:
    """Return the reason why backward passes would be noticed by global hooks; empty if there are none."""
    global_hooks = hooked._global_backward_hooks or hooked._global_backward_pre_hooks
    return "a backward hook on all modules would see the extra backward passes" if global_hooks else ""


@contextmanager
def gradients_kept(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Take the gradients of parameters away inside, and restore them afterwards."""
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
    """Enable graphs inside, and hide backward passes: they call no backward hooks of modules and parameters, leave no
    gradients, and do not advance random generators.

    Enter it inside :func:`~spectral_monitor.state.snapshot.preserved`, which restores the hooks of modules.
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
        for p, backward_hooks in hooks:
            p._backward_hooks = backward_hooks
        randomness.restore()
