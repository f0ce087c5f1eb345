"""Faults of the input of a loss, found in its graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from torch import Tensor

from spectral_monitor.capture.replay.loss_graph import BATCH_NORMS, before_shapes, edges, kind_of
from spectral_monitor.measurement import LossFault
from spectral_monitor.state.dtensor import local_part

BOUNDED = ("Softmax", "Sigmoid", "Tanh", "Relu")
RAW = (*BOUNDED, "Addmm", "Mm", "Bmm", "Convolution")
UNFIT = {
    "LogSoftmax": BOUNDED,
    "BinaryCrossEntropyWithLogits": BOUNDED,
    "LogSigmoid": ("Sigmoid", "Softmax"),
    "Sigmoid": ("Sigmoid", "Softmax"),
    "Softmax": ("Sigmoid", "Softmax"),
    "NllLoss": RAW,
    "NllLoss2D": RAW,
    "CtcLoss": RAW,
}
"""Node of a loss -> nodes whose outputs do not fit it: the first five take logits, the others log-probabilities."""
RANGES = {"Relu": (0.0, math.inf), "Sigmoid": (0.0, 1.0), "Softmax": (0.0, 1.0), "Tanh": (-1.0, 1.0)}
"""Node of an activation -> the range of its outputs."""
REGRESSIONS = ("MseLoss", "SmoothL1Loss", "HuberLoss")
"""Nodes of losses of outputs that should equal their targets."""
OUT_OF_REACH = 0.1
"""Mean square of the distances of targets from a range, over their own, above which the activation does not suit them.
For targets of mean 0 and variance 1 it is 0.5 behind a ReLU and 0.15 behind a tanh.
"""
ENTRYWISE = ("Pow", "Abs", "Mul", "Div", "Sub", *REGRESSIONS)
"""Nodes between a loss's mean and its differences of outputs and targets."""
LOG_LOSSES = ("NllLoss", "NllLoss2D")
"""Nodes of losses of log-probabilities, (N, C, ...)."""
JOINS = ("Stack", "Cat")
"""Nodes that join tensors."""
LAYERS = ("Addmm", "Mm", "Bmm", "Baddbmm", "Convolution", "Embedding", "NativeLayerNorm", "NativeBatchNorm")
"""Nodes of the network: the loss does not extend behind them."""
ATTENTION = ("Softmax", "SafeSoftmax")
"""Nodes of attention weights, (..., L, L)."""
RECURRENT = {"MkldnnRnnLayer": False, "CudnnRnn": True, "MiopenRnn": True}
"""Node of a recurrent layer, (L, N, C) -> whether it is (N, L, C) with ``batch_first=True``."""
BINARY = ("BinaryCrossEntropy", "BinaryCrossEntropyWithLogits")
"""Nodes of losses whose targets are probabilities."""
TARGETS = (-0.5, 1.5)
"""Targets outside of this range are not probabilities; noise that smooths them takes them a little beyond 0 and 1."""
MAX_NODES = 200
"""Nodes of a loss that are searched for inputs that do not fit."""
MAX_STEP_NODES = 60
"""Nodes of one step of a recurrent cell."""


class LossCheck:
    """Looks for faults of the losses of a step.

    Args:
        reads_targets: whether to look at the targets, which differ between processes.

    Attributes:
        on_loss: takes each loss as a scalar with its graph, if somebody reads that too.
    """

    def __init__(self, reads_targets: bool = True) -> None:
        self.on_loss: Callable[[Tensor], None] | None = None
        self._of_step: LossFault | None = None
        self._lasting: LossFault | None = None  # found at the first loss, because it stays
        self._reads_targets = reads_targets
        # Fault -> for each node of the first loss that may have it, whether its targets do not fit.
        self._unfit: dict[LossFault, list[Tensor]] = {}

    def begin(self) -> None:
        """Begin a step."""
        self._of_step = None

    def look(self, loss: Tensor) -> None:
        """Look at a loss before its backward pass; wait for no device."""
        if self._lasting is None:
            faults = {LossFault.SEQUENCE: takes_samples_for_sequence, LossFault.PAIRS: normalizes_pairs}
            self._lasting = next((fault for fault, check in faults.items() if check(loss)), LossFault.NONE)
            checks = {LossFault.TARGETS: unfit_targets, LossFault.REACH: targets_out_of_reach}
            self._unfit = {fault: check(loss) for fault, check in checks.items()} if self._reads_targets else {}
        self._of_step = max(self._of_step or LossFault.NONE, fault_of(loss))
        if self.on_loss is not None:
            self.on_loss(loss.reshape(()))

    @property
    def fault(self) -> LossFault | None:
        """The fault of the step's losses; ``None`` if none was seen.

        After the first loss, reading it waits for the device.
        """
        if self._of_step is None:
            return None
        for fault, unfit in self._unfit.items():
            if any(bool(one) for one in unfit):
                self._lasting = fault
        self._unfit = {}
        return max(self._of_step, self._lasting or LossFault.NONE)


def fault_of(loss: Tensor) -> LossFault:
    """Return what is wrong with the input of a loss.

    The graph tells, so nothing is known of compiled losses.

    Args:
        loss: with a graph, whose saved tensors may be gone.

    Example:
        >>> import torch
        >>> from torch.nn import functional as F
        >>> logits, target = torch.zeros(2, 3, requires_grad=True), torch.tensor([0, 1])
        >>> fault_of(F.cross_entropy(logits, target)).name
        'NONE'
        >>> fault_of(F.cross_entropy(logits.softmax(-1), target)).name
        'KIND'
        >>> outputs, targets = torch.zeros(5, 1, requires_grad=True), torch.arange(5.0)
        >>> fault_of((outputs - targets).square().mean()).name
        'ALL_PAIRS'
    """
    visited: set[Any] = set()
    queue = [(loss.grad_fn, True)]
    faults, compares_all = {LossFault.NONE}, False
    while queue and len(visited) < MAX_NODES:
        node, is_mean = queue.pop(0)  # ``is_mean``: whether the loss is a mean of functions of the node's entries
        if node is None or node in visited:
            continue
        visited.add(node)
        compares_all |= _is_of_pairs(node)
        kind, source = kind_of(node), node.next_functions[0][0] if node.next_functions else None
        parts = _joined_parts(source)
        if all(kind_of(_before_bias(before_shapes(part))) in UNFIT.get(kind, ()) for part in parts):
            faults.add(LossFault.KIND)
        if kind in LOG_LOSSES and all(map(_is_over_samples, parts)):
            faults.add(LossFault.OVER_SAMPLES)
        if is_mean and _is_broadcast(node):
            faults.add(LossFault.ALL_PAIRS)
        if kind not in LAYERS:
            is_mean = is_mean and (kind in ENTRYWISE or not _shape_of(node))
            queue += [(source, is_mean) for source, _ in node.next_functions]
    if compares_all:  # on purpose, as a distance between distributions does
        faults.discard(LossFault.ALL_PAIRS)
    return max(faults)


def unfit_targets(loss: Tensor) -> list[Tensor]:
    """Return, for each binary cross entropy of a loss, whether some target is far from 0 to 1; a single bool each.

    Such a loss has no minimum. The list is empty once a backward pass has freed the targets.

    Example:
        >>> import torch
        >>> from torch.nn import functional as F
        >>> logits, labels = torch.zeros(2, requires_grad=True), torch.tensor([0.0, 1.0])
        >>> losses = [F.binary_cross_entropy_with_logits(logits, factor * labels) for factor in (1, 255)]
        >>> [unfit.item() for loss in losses for unfit in unfit_targets(loss)]
        [False, True]
    """
    low, high = TARGETS
    return [((targets < low) | (targets > high)).any() for _, targets in _with_targets(loss, BINARY)]


def targets_out_of_reach(loss: Tensor) -> list[Tensor]:
    """Return, for each regression of a loss on outputs of an activation, whether most targets are out of their reach.

    The list is empty once a backward pass has freed the targets.

    Example:
        >>> import torch
        >>> from torch.nn import functional as F
        >>> outputs, targets = torch.ones(3, requires_grad=True).relu(), torch.tensor([-1.0, 0.0, 1.0])
        >>> losses = [F.mse_loss(outputs, targets + shift) for shift in (1, 0)]
        >>> [far.item() for loss in losses for far in targets_out_of_reach(loss)]
        [False, True]
    """
    far = []
    for node, targets in _with_targets(loss, REGRESSIONS):
        if limits := RANGES.get(kind_of(before_shapes(node.next_functions[0][0]))):
            distances = targets - targets.clamp(*limits)
            far.append(distances.square().mean() > OUT_OF_REACH * targets.square().mean())
    return far


def _with_targets(loss: Tensor, kinds: Collection[str]) -> list[tuple[Any, Tensor]]:
    """Return the nodes of some kinds in a loss, each with its targets; none once a backward pass has freed these."""
    nodes = {loss.grad_fn, *(node for _, _, node in edges(loss.grad_fn))}
    try:
        return [(node, local_part(node._saved_target)) for node in nodes if kind_of(node) in kinds]
    except RuntimeError:
        return []


def _joined_parts(node: Any) -> list[Any]:
    """Return the nodes whose values a node joins, as where a decoder joins the outputs of its steps; else the node."""
    joint = before_shapes(node)
    if kind_of(joint) in JOINS:
        return [part for part, _ in joint.next_functions]
    if joint is not None and joint.name().endswith("CopySlices"):  # of the steps that are written into it, the latest
        return [joint.next_functions[-1][0]]
    return [node]


def _is_over_samples(node: Any) -> bool:
    """Return whether a node normalizes log-probabilities over the samples.

    A square table of similarities may be normalized in both directions.
    """
    shape = _shape_of(node)
    return kind_of(node) == "LogSoftmax" and len(shape) > 1 and shape[0] != shape[1] and node._saved_dim == 0


def _is_broadcast(node: Any) -> bool:
    """Return whether a node makes N x N numbers from N outputs and N constants."""
    shape, sources = _shape_of(node), [edge for edge in node.next_functions if edge[0] is not None]
    if kind_of(node) not in ("Sub", "Expand") or len(sources) != 1 or len(shape) < 2 or not shape[0] == shape[1] > 2:
        return False
    return math.prod(_shape_of(*sources[0])) * shape[0] == math.prod(shape)


def _is_of_pairs(node: Any) -> bool:
    """Return whether a node subtracts each of N outputs from every one of them."""
    shape = _shape_of(node)
    if kind_of(node) != "Sub" or len(shape) < 2 or shape[0] != shape[1]:
        return False
    return all(
        source is not None and math.prod(_shape_of(source, number)) * shape[0] == math.prod(shape)
        for source, number in node.next_functions
    )


def _shape_of(node: Any, number: int = 0) -> tuple[int, ...]:
    """Return the shape of one of a node's outputs; ``(0,)`` if the node does not have it."""
    metadata = getattr(node, "_input_metadata", ())  # of the backward pass, whose inputs are gradients of outputs
    return tuple(metadata[number].shape) if len(metadata) > number else (0,)


def _before_bias(node: Any) -> Any:
    """Return the node to whose output a node adds a bias; the node itself if it adds none."""
    if kind_of(node) == "Add" and len(node.next_functions) == 2:
        (product, _), (bias, _) = node.next_functions
        if (leaf := before_shapes(bias)) is not None and leaf.name().endswith("AccumulateGrad"):
            return before_shapes(product)
    return node


def takes_samples_for_sequence(loss: Tensor) -> bool:
    """Return whether all attention and recurrent modules of a network take its samples for the steps of a sequence.

    Then sequences are as long as the loss has samples, and the number of sequences is not that of samples, as with
    ``batch_first=False`` and data whose samples come first.

    Example:
        >>> import torch
        >>> for batch_first in (True, False):
        ...     attention = torch.nn.MultiheadAttention(8, 2, batch_first=batch_first)
        ...     x = torch.randn(16, 5, 8)  # 16 samples of 5 steps
        ...     loss = attention(x, x, x)[0].mean(1).square().mean()
        ...     takes_samples_for_sequence(loss)
        False
        True
    """
    rows, numbers = _size_of_loss(loss.grad_fn)
    if rows < 2:
        return False
    users: dict[Any, Any] = {}
    sequences: list[tuple[int, int]] = []
    for user, _, node in edges(loss.grad_fn):
        users.setdefault(node, user)
        sequences += _sequences(node, users)
    return bool(sequences) and all(
        length == rows and count > 1 and count % rows and count != numbers for length, count in sequences
    )


def normalizes_pairs(loss: Tensor) -> bool:
    """Return whether most batch norms in training mode see only two values of each channel, as with batches of 2.

    Example:
        >>> import torch
        >>> network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
        >>> [normalizes_pairs(network(torch.randn(count, 4)).square().mean()) for count in (2, 3)]
        [True, False]
    """
    norms = {node for _, _, node in edges(loss.grad_fn) if kind_of(node) in BATCH_NORMS and node._saved_training}
    shapes = [shape for node in norms if len(shape := _shape_of(node)) > 1]
    pairs = sum(shape[0] * math.prod(shape[2:]) == 2 for shape in shapes)
    return 2 * pairs > len(shapes)


def _size_of_loss(node: Any) -> tuple[int, int]:
    """Return the number of samples that a loss is the mean of, and that of its numbers for each; 0 if unknown."""
    for _ in range(MAX_NODES):
        shape = _shape_of(node)
        if shape:
            numbers = 1 if kind_of(node) == "LogSoftmax" else math.prod(shape[1:])
            return (shape[0], numbers) if len(shape) < 3 else (0, 0)
        node = next((source for source, _ in node.next_functions if source is not None), None)
        if node is None:
            break
    return 0, 0


def _sequences(node: Any, users: Mapping[Any, Any]) -> Iterator[tuple[int, int]]:
    """Yield the length and the number of sequences that a node works on; nothing if it works on none."""
    kind, shape = kind_of(node), _shape_of(node)
    if kind.startswith("ScaledDotProduct") and len(shape) == 4:  # (N, heads, L, C)
        yield shape[2], shape[0]
    elif kind in RECURRENT and len(shape) == 3:
        samples_first = RECURRENT[kind] and node._saved_batch_first
        yield (shape[1], shape[0]) if samples_first else shape[:2]
    elif kind in ATTENTION and len(shape) == 4 and shape[2] == shape[3]:  # (N, heads, L, L)
        yield shape[2], shape[0]
    elif kind in ATTENTION and len(shape) == 3 and shape[1] == shape[2]:  # (N * heads, L, L)
        user = node
        while user in users and kind_of(user) not in ("Addmm", "Mm"):  # the output projection of L * N rows
            user = users[user]
        yield shape[1], _shape_of(user)[0] // shape[1] if _shape_of(user) else 0
    elif kind == "Stack" and len(shape) == 3 and node._saved_dim == 0 and _is_recurrent(node):
        yield shape[0], shape[1]


def _is_recurrent(node: Any) -> bool:
    """Return whether the second of the tensors that a node stacks was computed from the first."""
    if len(node.next_functions) < 2:
        return False
    (first, _), (second, _) = node.next_functions[:2]
    queue, visited = [second], set[Any]()
    while queue and len(visited) < MAX_STEP_NODES:
        source = queue.pop(0)
        if source is first:
            return True
        if source is not None and source not in visited:
            visited.add(source)
            queue += [before for before, _ in source.next_functions]
    return False
