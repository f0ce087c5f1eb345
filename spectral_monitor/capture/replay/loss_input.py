"""The inputs of a loss, and whether they are what it takes: logits, or outputs that went through an activation."""

from __future__ import annotations

from typing import Any

from torch import Tensor

BOUNDED = ("Softmax", "Sigmoid", "Tanh", "Relu")
RAW = (*BOUNDED, "Addmm", "Mm", "Convolution")
UNFIT = {
    "LogSoftmax": BOUNDED,
    "BinaryCrossEntropyWithLogits": BOUNDED,
    "NllLoss": RAW,
    "NllLoss2D": RAW,
    "CtcLoss": RAW,
}
"""Node of a loss -> nodes whose outputs are no input for it: the first two take logits, others log-probabilities."""
SHAPES = (
    *("View", "UnsafeView", "Reshape", "Transpose", "Permute", "T", "Squeeze", "Unsqueeze", "Slice", "Select", "Index"),
    *("ToCopy", "Clone", "Alias", "Expand", "AsStrided", "Narrow", "Split", "Unbind"),
)
"""Nodes that pass on what they are given in another shape or precision."""
LAYERS = ("Addmm", "Mm", "Bmm", "Baddbmm", "Convolution", "Embedding", "NativeLayerNorm", "NativeBatchNorm")
"""Nodes behind which no part of a loss is looked for."""
MOST = 200
"""Nodes that are looked at."""


def has_unfit_input(loss: Tensor) -> bool:
    """Return whether a loss that takes logits is given probabilities or what another activation returns, or whether one
    of log-probabilities is given something else.

    It is read off the graph, so of compiled losses nothing is known.

    Args:
        loss: with a graph, of which the saved tensors may be gone.

    Example:
        >>> import torch
        >>> from torch.nn import functional as F
        >>> logits, target = torch.zeros(2, 3, requires_grad=True), torch.tensor([0, 1])
        >>> has_unfit_input(F.cross_entropy(logits, target))
        False
        >>> has_unfit_input(F.cross_entropy(logits.softmax(-1), target))
        True
    """
    seen: set[Any] = set()
    left = [loss.grad_fn]
    while left and len(seen) < MOST:
        node = left.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        given = node.next_functions[0][0] if node.next_functions else None
        if kind_of(before_shapes(given)) in UNFIT.get(kind_of(node), ()):
            return True
        if kind_of(node) not in LAYERS:
            left += [following for following, _ in node.next_functions]
    return False


def before_shapes(node: Any) -> Any:
    """Return the node that made what a node passes on, before it got its shape and precision."""
    while kind_of(node) in SHAPES and node.next_functions:
        node = node.next_functions[0][0]
    return node


def kind_of(node: Any) -> str:
    """Return the name of a node's operation."""
    return "" if node is None else node.name().removeprefix("torch::autograd::").rpartition("Backward")[0]
