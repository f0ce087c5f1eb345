"""Constants that a network multiplies embeddings with, read off the graph of what it returns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from spectral_monitor.capture.replay.loss_input import before_shapes, kind_of


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
