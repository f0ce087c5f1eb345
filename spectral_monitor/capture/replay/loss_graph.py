"""Read off the graph of a loss: inputs that went through an activation where it takes logits, say, the constants that
a network multiplies embeddings with, and how deep it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

BOUNDED = ("Softmax", "Sigmoid", "Tanh", "Relu")
RAW = (*BOUNDED, "Addmm", "Mm", "Bmm", "Convolution")
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
MATRICES = ("Addmm", "Mm", "Convolution", "MkldnnConvolution")
"""Nodes that multiply with a matrix of the network's."""
BATCH_NORMS = ("NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm")
MOST = 200
"""Nodes that are looked at for inputs of losses."""


def is_over_classes(loss: Tensor) -> bool:
    """Return whether a loss is one of log-probabilities, as a cross entropy is."""
    nodes = [loss.grad_fn, *(node for _, _, node in _edges(loss.grad_fn))]
    return any(kind_of(node) == "LogSoftmax" for node in nodes)


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
        if kind_of(_before_bias(before_shapes(given))) in UNFIT.get(kind_of(node), ()):
            return True
        if kind_of(node) not in LAYERS:
            left += [following for following, _ in node.next_functions]
    return False


def before_shapes(node: Any) -> Any:
    """Return the node that made what a node passes on, before it got its shape and precision."""
    while kind_of(node) in SHAPES and node.next_functions:
        node = node.next_functions[0][0]
    return node


def _before_bias(node: Any) -> Any:
    """Return the node whose output a bias is added to, where a layer does that apart; else the node itself."""
    if kind_of(node) == "Add" and len(node.next_functions) == 2:
        (made, _), (bias, _) = node.next_functions
        if (leaf := before_shapes(bias)) is not None and leaf.name().endswith("AccumulateGrad"):
            return before_shapes(made)
    return node


def kind_of(node: Any) -> str:
    """Return the name of a node's operation."""
    return "" if node is None else node.name().removeprefix("torch::autograd::").rpartition("Backward")[0]


def embedding_scales(output: Tensor) -> dict[int, float]:
    """Return number of rows -> what embeddings with so many are multiplied by, as in Vaswani et al. (2017).

    It is 1 where there is no such constant, or not the same one in every use. What is multiplied with anything but a
    single number is not scaled.

    Args:
        output: a loss, or what a model returns, with a graph through which no backward pass has gone yet.

    Raises:
        RuntimeError: one has, and took the constants.

    Example:
        >>> import torch
        >>> table = torch.nn.Embedding(10, 16)
        >>> embedding_scales((4 * table(torch.arange(3))).sum())
        {10: 4.0}
    """
    found: dict[int, set[float]] = {}
    for consumer, place, node in _edges(output.grad_fn):
        if kind_of(node) == "Embedding":
            scale = _constant(consumer, place)
            found.setdefault(int(node._saved_weight_sym_argsize_0), set()).add(scale)
    return {rows: scales.pop() if len(scales) == 1 else 1.0 for rows, scales in found.items()}


class Depth(NamedTuple):
    """Depth of a network along the way from its output back to its inputs that has the fewest matrices."""

    matrices: int = 0  # on that way; 0 where none is seen, as in compiled graphs
    branches: int = 0  # residual branches that join it


def depth_of(output: Tensor) -> Depth:
    """Return the least number of matrices on a way from an output back to one that takes the network's inputs, and how
    many residual branches join that way.

    Residual connections are ways around matrices, so networks of residual blocks have two, at any depth: the first and
    the last. A matrix whose outputs go into a batch norm does not count, nor does a branch that ends in one. A matrix
    that is used again and again counts once, and an embedding is the end of a way.

    Args:
        output: a loss, or what a model returns, with a graph.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> first, block, last = (nn.Linear(4, 4) for _ in range(3))
        >>> x = torch.ones(2, 4)
        >>> tuple(depth_of(last(block(first(x)).relu()))), tuple(depth_of(last(first(x) + block(first(x)))))
        ((3, 0), (2, 1))
    """
    first = before_shapes(output.grad_fn)
    users: dict[Any, list[Any]] = {first: []}
    for consumer, _, node in _edges(output.grad_fn):
        users.setdefault(node, []).append(consumer)
    behind = _behind_matrices(users)
    weights = {_weight_of(node) for node in users if kind_of(node) in MATRICES}
    way: dict[Any, Any] = {}  # node -> the one that uses it, on the way with the fewest matrices
    left: deque[tuple[Any, Any, int]] = deque([(first, None, int(kind_of(first) in MATRICES))])
    while left:  # ways that add no matrix come first, so each node is met with the fewest
        node, user, passed = left.popleft()
        if node in way:
            continue
        way[node] = user
        if kind_of(node) == "Embedding" or (kind_of(node) in MATRICES and node not in behind):
            return Depth(min(passed, len(weights)), _branches(node, way, behind))
        for maker in _makers(node):
            counts = kind_of(maker) in MATRICES and kind_of(node) not in BATCH_NORMS
            (left.append if counts else left.appendleft)((maker, node, passed + counts))
    return Depth()


def _branches(node: Any, way: Mapping[Any, Any], behind: set[Any]) -> int:
    """Return how many sums of two things that matrices or embeddings have made are on the way from a node.

    A batch norm takes out how large a branch is, so branches that end in one are left out.
    """
    count = 0
    while node is not None:
        makers = list(_makers(node)) if kind_of(node) == "Add" else []
        made = [maker for maker in makers if maker in behind or kind_of(maker) in (*MATRICES, "Embedding")]
        count += len(made) == 2 and not any(kind_of(maker) in BATCH_NORMS for maker in made)
        node = way[node]
    return count


def _weight_of(node: Any) -> Any:
    """Return what makes the weight that a node multiplies with: the same in every use; the node itself if unknown."""
    made = [maker for maker in _makers(node) if maker.name().endswith("AccumulateGrad") and maker.variable.dim() > 1]
    return made[-1] if made else node  # inputs that are leaves come before it


def _behind_matrices(users: Mapping[Any, Sequence[Any]]) -> set[Any]:
    """Return the nodes that use, by way of others, the output of a matrix or an embedding; ``users``: of each node."""
    found: set[Any] = set()
    left = [node for node in users if kind_of(node) in (*MATRICES, "Embedding")]
    while left:
        new = [user for user in users.get(left.pop(), ()) if user not in found]
        found.update(new)
        left += new
    return found


def _makers(consumer: Any) -> Iterator[Any]:
    """Yield the nodes whose outputs a node uses; those that only pass them on are left out."""
    for node, _ in consumer.next_functions if consumer is not None else ():
        if (maker := before_shapes(node)) is not None:
            yield maker


def _edges(root: Any) -> Iterator[tuple[Any, int, Any]]:
    """Yield each node that uses another one's output, at which place, and that; nodes that only pass it on left out."""
    left, seen = [root], {root}
    while left:
        consumer = left.pop()
        for place, (node, _) in enumerate(consumer.next_functions if consumer is not None else ()):
            maker = before_shapes(node)
            if maker is None:
                continue
            yield consumer, place, maker
            if maker not in seen:
                seen.add(maker)
                left.append(maker)


def _constant(consumer: Any, place: int) -> float:
    """Return the single number that a node multiplies what it is given at a place with; 1 if it does not."""
    kind, other = kind_of(consumer), None
    if kind in ("Mul", "Div") and place == 0:
        other = consumer._saved_other
    elif kind == "Mul":
        other = consumer._saved_self
    if not isinstance(other, Tensor) or other.numel() != 1 or other.requires_grad:
        return 1.0
    size = abs(float(other))
    if not size:
        return 1.0
    return 1 / size if kind == "Div" else size
