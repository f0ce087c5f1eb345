"""Facts from the graph of a loss: parameters, factors of embeddings, the network's depth, recurrent layers."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

SHAPES = (
    *("View", "UnsafeView", "Reshape", "Transpose", "Permute", "T", "Squeeze", "Unsqueeze", "Slice", "Select", "Index"),
    *("ToCopy", "Clone", "Alias", "Expand", "AsStrided", "Narrow", "Split", "Unbind"),
)
"""Nodes that only change shape or precision."""
MATRICES = ("Addmm", "Mm", "Convolution", "MkldnnConvolution")
"""Nodes that multiply with a matrix of the network."""
RECURRENT = ("MkldnnRnnLayer", "CudnnRnn", "MiopenRnn", "ThnnFusedLstmCell", "ThnnFusedGruCell")
"""Nodes that compute recurrent layers; otherwise these consist of matrices that are used at every step."""
BATCH_NORMS = ("NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm")
CHANNEL_NORMS = (*BATCH_NORMS, "NativeGroupNorm")
"""Norms of channels, as convolutional networks have them."""
NORMS = (*CHANNEL_NORMS, "NativeLayerNorm", "FusedRmsNorm", "Pow", "Var", "VarMean", "Std")
"""Nodes with which norms read their inputs; the last four belong to norms written by hand."""


def is_over_classes(loss: Tensor) -> bool:
    """Return whether a loss uses log-probabilities, as a cross entropy does."""
    nodes = [loss.grad_fn, *(node for _, _, node in edges(loss.grad_fn))]
    return any(kind_of(node) == "LogSoftmax" for node in nodes)


def before_shapes(node: Any) -> Any:
    """Return the node that computed a node's values, before changes of shape and precision."""
    while kind_of(node) in SHAPES and node.next_functions:
        node = node.next_functions[0][0]
    return node


def kind_of(node: Any) -> str:
    """Return the name of a node's operation."""
    return "" if node is None else node.name().removeprefix("torch::autograd::").rpartition("Backward")[0]


def embedding_scales(output: Tensor) -> dict[int, float]:
    """Return number of rows -> constant factor of embeddings with so many rows, as in Vaswani et al. (2017).

    The factor is 1 if there is none, if it is not a single number, or if it differs between uses.

    Args:
        output: a loss, or the output of a model, with a graph before its backward pass.

    Raises:
        RuntimeError: a backward pass has freed the constants.

    Example:
        >>> import torch
        >>> table = torch.nn.Embedding(10, 16)
        >>> embedding_scales((4 * table(torch.arange(3))).sum())
        {10: 4.0}
    """
    factors: dict[int, set[float]] = {}
    for consumer, position, node in edges(output.grad_fn):
        if kind_of(node) == "Embedding":
            rows = int(node._saved_weight_sym_argsize_0)
            factors.setdefault(rows, set()).add(_constant(consumer, position))
    return {rows: values.pop() if len(values) == 1 else 1.0 for rows, values in factors.items()}


def parameters_in(output: Tensor) -> list[nn.Parameter]:
    """Return the parameters that an output was computed from, each once.

    Example:
        >>> import torch
        >>> first, last = nn.Linear(2, 3), nn.Linear(3, 1)
        >>> [tuple(p.shape) for p in parameters_in(last(first(torch.ones(2)).relu()))]
        [(1,), (1, 3), (3,), (3, 2)]
    """
    leaves = (node.variable for _, _, node in edges(output.grad_fn) if node.name().endswith("AccumulateGrad"))
    return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, nn.Parameter)}.values())


class Depth(NamedTuple):
    """Depth of a network: along the path with the fewest matrices, from its output back to its inputs."""

    matrices: int = 0  # on that path; 0 if none is found, as in compiled graphs
    branches: int = 0  # residual branches that join it
    post_norms: int = 0  # of these, branches whose sum only a norm reads (post-norm), if most are; else 0
    normed: int = 0  # trained matrices that a batch or group norm reads, on the path with the most of them


def depth_of(output: Tensor) -> Depth:
    """Return the least number of matrices on a path from an output back to the network's inputs, the number of
    residual branches that join this path, and how many of their sums are normalized at once, as in post-norm blocks.

    Residual connections are paths around matrices, so a network of residual blocks has two matrices at any depth: the
    first and the last. A matrix whose outputs go into a batch norm does not count, nor does a branch that ends in one.
    A matrix that is used repeatedly counts once, and so do the sums of all steps of a GRU. A path ends at an embedding.

    Args:
        output: a loss, or the output of a model, with a graph.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> first, block, last = (nn.Linear(4, 4) for _ in range(3))
        >>> x = torch.ones(2, 4)
        >>> tuple(depth_of(last(block(first(x)).relu()))), tuple(depth_of(last(first(x) + block(first(x)))))
        ((3, 0, 0, 0), (2, 1, 0, 0))
    """
    first = before_shapes(output.grad_fn)
    users: dict[Any, list[Any]] = {first: []}
    for consumer, _, node in edges(output.grad_fn):
        users.setdefault(node, []).append(consumer)
    behind, normed = _behind_matrices(users), _most_normed(first, users)
    weights = {_weight_of(node) for node in users if kind_of(node) in MATRICES}
    path: dict[Any, Any] = {}  # node -> its user on the path with the fewest matrices
    queue: deque[tuple[Any, Any, int]] = deque([(first, None, int(kind_of(first) in MATRICES))])
    while queue:  # paths that add no matrix come first, so each node is reached with the fewest
        node, user, matrices = queue.popleft()
        if node in path:
            continue
        path[node] = user
        if kind_of(node) == "Embedding" or (kind_of(node) in MATRICES and node not in behind):
            branches = list(_branches(node, path, behind, users))
            post_norms = sum(_only_normed(users[branch]) for branch in branches)
            # A last norm, or those between the stages of a network, do not make it post-norm.
            numbers = matrices, len(branches), post_norms if 2 * post_norms > len(branches) else 0, normed
            return Depth(*(min(number, len(weights)) for number in numbers))
        for source in _sources(node):
            counts = kind_of(source) in MATRICES and kind_of(node) not in BATCH_NORMS
            (queue.append if counts else queue.appendleft)((source, node, matrices + counts))
    return Depth()


def _branches(
    node: Any, path: Mapping[Any, Any], behind: set[Any], users: Mapping[Any, Sequence[Any]]
) -> Iterator[Any]:
    """Yield the sums on the path from a node in which both terms come from matrices or embeddings.

    A batch norm removes the size of a branch, so branches that end in one do not count. Of post-norm blocks both terms
    may end in one.
    """
    while node is not None:
        terms = list(_sources(node)) if kind_of(node) == "Add" else []
        computed = [term for term in terms if term in behind or kind_of(term) in (*MATRICES, "Embedding")]
        sized = not any(kind_of(term) in BATCH_NORMS for term in computed) or _only_normed(users[node])
        if len(computed) == 2 and sized:
            yield node
        node = path[node]


def _most_normed(root: Any, users: Mapping[Any, Sequence[Any]]) -> int:
    """Return the largest number of trained matrices that norms of channels read, on a path from the root of a graph.

    ``users``: of each node.
    """
    most: dict[Any, int] = {}
    stack = [root]
    while stack:
        node = stack[-1]
        sources = list(_sources(node))
        if missing := [source for source in sources if source not in most]:
            stack += missing
            continue
        stack.pop()
        is_trained = kind_of(node) in MATRICES and _weight_of(node) is not node
        is_normed = any(kind_of(user) in CHANNEL_NORMS for user in users.get(node, ()))
        most[node] = max((most[source] for source in sources), default=0) + (is_trained and is_normed)
    return most[root]


def _only_normed(users: Sequence[Any]) -> bool:
    """Return whether users normalize a sum, and no residual connection takes it further as it is."""
    kinds = {kind_of(user) for user in users}
    return "Add" not in kinds and not kinds.isdisjoint(NORMS)


def reads_recurrent(output: Tensor, weights: Sequence[Tensor]) -> bool:
    """Return whether a matrix reads outputs of recurrent layers, with no other matrix and no norm in between.

    Args:
        output: a loss, or the output of a model, with a graph.
        weights: the parameters that make up the matrix.

    Example:
        >>> import torch
        >>> recurrent, head = torch.nn.LSTM(4, 8), torch.nn.Linear(8, 2)
        >>> reads_recurrent(head(recurrent(torch.ones(3, 1, 4))[0]), [head.weight])
        True
    """
    nodes = {before_shapes(output.grad_fn), *(node for _, _, node in edges(output.grad_fn))}
    leaf_of = {node: _weight_of(node) for node in nodes if kind_of(node) in MATRICES}
    uses = Counter(leaf_of.values())
    readers = [node for node, leaf in leaf_of.items() if any(getattr(leaf, "variable", None) is w for w in weights)]
    stack, visited = [source for node in readers for source in _sources(node)], set()
    is_bounded = is_repeated = False  # as outputs of recurrent layers that consist of matrices
    while stack:
        node = stack.pop()
        if node in visited or kind_of(node) in (*NORMS, "Embedding"):
            continue
        visited.add(node)
        if kind_of(node) in RECURRENT:
            return True
        is_bounded |= kind_of(node) == "Tanh"
        if node in leaf_of:
            is_repeated |= uses[leaf_of[node]] > 1
        else:
            stack += _sources(node)
    return is_bounded and is_repeated


def _weight_of(node: Any) -> Any:
    """Return the leaf of the weight that a node multiplies with, the same in every use; the node itself if unknown."""
    leaves = [source for source in _sources(node) if source.name().endswith("AccumulateGrad")]
    matrices = [leaf for leaf in leaves if leaf.variable.dim() > 1]
    return matrices[-1] if matrices else node  # an input that is a leaf comes before the weight


def _behind_matrices(users: Mapping[Any, Sequence[Any]]) -> set[Any]:
    """Return the nodes that use the output of a matrix or an embedding, also indirectly; ``users``: of each node."""
    behind: set[Any] = set()
    stack = [node for node in users if kind_of(node) in (*MATRICES, "Embedding")]
    while stack:
        new = [user for user in users.get(stack.pop(), ()) if user not in behind]
        behind.update(new)
        stack += new
    return behind


def _sources(consumer: Any) -> Iterator[Any]:
    """Yield the nodes whose outputs a node uses, without nodes that only change shape or precision."""
    for node, _ in consumer.next_functions if consumer is not None else ():
        if (source := before_shapes(node)) is not None:
            yield source


def edges(root: Any) -> Iterator[tuple[Any, int, Any]]:
    """Yield each node, the position of one of its inputs, and the node that computed that input."""
    stack, visited = [root], {root}
    while stack:
        consumer = stack.pop()
        for position, (node, _) in enumerate(consumer.next_functions if consumer is not None else ()):
            source = before_shapes(node)
            if source is None:
                continue
            yield consumer, position, source
            if source not in visited:
                visited.add(source)
                stack.append(source)


def _constant(consumer: Any, position: int) -> float:
    """Return the single number with which a node multiplies its input at a position; 1 if it does not."""
    kind, other = kind_of(consumer), None
    if kind in ("Mul", "Div") and position == 0:
        other = consumer._saved_other
    elif kind == "Mul":
        other = consumer._saved_self
    if not isinstance(other, Tensor) or other.numel() != 1 or other.requires_grad:
        return 1.0
    size = abs(float(other))
    if not size:
        return 1.0
    return 1 / size if kind == "Div" else size
