"""Samples of a batch: nested containers of tensors, some of which have an entry for each sample."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from spectral_monitor.state.dtensor import is_distributed

Samples = slice | list[int]
"""Some of the samples of a batch, by their indices."""


def tree_map(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of nested containers, of their own types, with a function applied to each tensor.

    Other leaves are shared, and so are tuples in which nothing changes.

    Raises:
        Exception: an error in copying a container of the user's.
    """
    if isinstance(value, Tensor):
        return function(value)
    if _wraps_dict(value):
        container = _copied(value)
        container.data = tree_map(value.data, function)
        return container
    old_items = contents(value)
    if old_items is None:
        return value
    items = [(key, tree_map(item, function)) for key, item in old_items]
    if isinstance(value, tuple):
        same = all(new is old for (_, new), (_, old) in zip(items, old_items, strict=True))
        return value if same else _tuple_like(value, [item for _, item in items])
    container = _copied(value)
    for (key, new), (_, old) in zip(items, old_items, strict=True):
        if isinstance(value, (list, dict)):
            container[key] = new
        elif new is not old:
            object.__setattr__(container, key, new)  # dataclasses may be frozen
    return container


def contents(value: Any) -> list[tuple[Any, Any]] | None:
    """Return the items of a container, each with its index, key or name; ``None`` for anything else."""
    if isinstance(value, (tuple, list)):
        return list(enumerate(value))
    if isinstance(value, dict) or _wraps_dict(value):
        return list(value.items())
    if is_dataclass(value) and not isinstance(value, (type, nn.Module)):
        # Attributes that __post_init__ adds are no fields; a class with slots has only fields.
        names = dict.fromkeys([*(f.name for f in fields(value)), *getattr(value, "__dict__", ())])
        return [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    return None


def _wraps_dict(value: Any) -> bool:
    """Return whether a value is a UserDict, a BatchEncoding or the like."""
    return not isinstance(value, dict) and isinstance(value, Mapping) and isinstance(getattr(value, "data", None), dict)


def _copied(value: Any) -> Any:
    container = copy.copy(value)
    if container is value:
        raise TypeError(f"a {type(value).__name__} cannot be copied")
    return container


def _tuple_like(value: Any, items: list[Any]) -> Any:
    """Return a tuple of the same class, without a call of its constructor, which may take any arguments."""
    kind = type(value)
    if hasattr(kind, "n_fields"):  # torch's own named tuples, such as the output of torch.max, need theirs
        return kind(items)
    new = tuple.__new__(kind, items)
    if hasattr(value, "__dict__"):
        vars(new).update(vars(value))
    return new


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each leaf that :func:`tree_map` maps or shares, with its path."""
    items = None if isinstance(value, Tensor) else contents(value)
    if items is None:
        yield path, value
    else:
        for key, item in items:
            yield from leaves(item, f"{path}/{key}")


def batch_size(tree: Any) -> int | None:
    """Return the number of samples: the length of the first tensor that is longer than 1, else of the first one.

    It is ``None`` without a tensor that has dimensions, or if a tensor cannot be sliced.
    """
    tensors = [leaf for _, leaf in leaves(tree) if isinstance(leaf, Tensor)]
    if any(x.layout != torch.strided or x.is_nested or is_distributed(x) for x in tensors):
        return None
    lengths = [len(x) for x in tensors if x.ndim]
    return next((length for length in lengths if length > 1), lengths[0] if lengths else None)


def signature(tree: Any) -> tuple[tuple[str, Hashable, str], ...]:
    """Return the paths of the leaves, their kinds, and the values of numbers and strings.

    :func:`slice_batch` slices the same tensors in batches with one signature, and the forward is given the same numbers
    and strings.
    """
    size = batch_size(tree)

    def kind(leaf: Any) -> Hashable:
        if isinstance(leaf, Tensor):
            return leaf.ndim, leaf.ndim > 0 and len(leaf) == size
        return type(leaf).__qualname__

    return tuple((path, kind(leaf), _value(leaf)) for path, leaf in leaves(tree))


def _value(leaf: Any) -> str:
    """Return a number, a string or a member of an Enum as text, the same in every process; empty for other leaves."""
    if isinstance(leaf, Enum):
        return str(leaf.name or leaf.value)
    plain = next((kind for kind in (int, float, complex, str, bytes) if isinstance(leaf, kind)), None)
    return "" if plain is None else plain.__repr__(leaf)


def slice_batch(tree: Any, samples: Samples) -> Any:
    """Return a copy of the tree with some samples only: tensors with an entry for each sample are sliced."""
    size = batch_size(tree)

    def sliced(x: Tensor) -> Tensor:
        part = x[samples] if x.ndim and len(x) == size else x
        return part.detach().clone().requires_grad_(x.requires_grad)

    return tree_map(tree, sliced)


@dataclass(frozen=True)
class BatchSlice:
    """The first samples of a batch.

    Example:
        >>> portion = BatchSlice(samples=2, batch=8, common=frozenset({(0, 0)}))
        >>> portion.rows((0, 0), 12), portion.rows((1, 0), 96), portion.rows((1, 0), 97)
        (12, 24, None)
    """

    samples: int  # number of samples in the slice
    batch: int  # number of samples in the batch
    # calls, as (layer index, number of the call), whose outputs have no entries for samples, such as position
    # embeddings
    common: frozenset[tuple[int, int]] = frozenset()

    def rows(self, call: tuple[int, int], count: int) -> int | None:
        """Return the number of a call's first rows that belong to these samples; ``None`` if that is no integer."""
        if call in self.common:
            return count
        rows, remainder = divmod(count * self.samples, self.batch)
        return None if remainder else rows

    def all_rows(self, call: tuple[int, int], rows: int) -> int:
        """Return the number of rows of a call for the whole batch, from its number for these samples."""
        return rows if call in self.common else rows * self.batch // self.samples
