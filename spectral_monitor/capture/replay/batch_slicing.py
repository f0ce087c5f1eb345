"""The samples of a batch: of nested containers of tensors, those that have an entry for each."""

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
"""Some of the samples of a batch, by their places in it."""


def tree_map(value: Any, of: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of nested containers, of their own types, with ``of`` applied to each tensor; anything else is
    shared.

    What cannot be changed is copied only if something inside is.

    Raises:
        Exception: what copying a container of the user's raises.
    """
    if isinstance(value, Tensor):
        return of(value)
    if _wraps_dict(value):
        copied = _copied(value)
        copied.data = tree_map(value.data, of)
        return copied
    inside = contents(value)
    if inside is None:
        return value
    items = [(key, tree_map(item, of)) for key, item in inside]
    if isinstance(value, tuple):
        same = all(new is old for (_, new), (_, old) in zip(items, inside, strict=True))
        return value if same else _tuple_like(value, [item for _, item in items])
    copied = _copied(value)
    for (key, new), (_, old) in zip(items, inside, strict=True):
        if isinstance(value, (list, dict)):
            copied[key] = new
        elif new is not old:
            object.__setattr__(copied, key, new)  # dataclasses may be frozen
    return copied


def contents(value: Any) -> list[tuple[Any, Any]] | None:
    """Return what a container holds, and under which index, key or name; ``None`` for anything else."""
    if isinstance(value, (tuple, list)):
        return list(enumerate(value))
    if isinstance(value, dict) or _wraps_dict(value):
        return list(value.items())
    if is_dataclass(value) and not isinstance(value, (type, nn.Module)):
        # What __post_init__ has added is no field; with slots there are fields alone.
        names = dict.fromkeys([*(f.name for f in fields(value)), *getattr(value, "__dict__", ())])
        return [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    return None


def _wraps_dict(value: Any) -> bool:
    """Return whether it is a UserDict, a BatchEncoding or the like."""
    return not isinstance(value, dict) and isinstance(value, Mapping) and isinstance(getattr(value, "data", None), dict)


def _copied(value: Any) -> Any:
    copied = copy.copy(value)
    if copied is value:
        raise TypeError(f"a copy of a {type(value).__name__} is itself")
    return copied


def _tuple_like(value: Any, items: list[Any]) -> Any:
    """Return a tuple of the same class, whose constructor may take anything."""
    kind = type(value)
    if hasattr(kind, "n_fields"):  # what torch.max returns, for one, can only be made by its class
        return kind(items)
    made = tuple.__new__(kind, items)
    if hasattr(value, "__dict__"):
        vars(made).update(vars(value))
    return made


def leaves(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each leaf that :func:`tree_map` maps or shares, and its place."""
    inside = None if isinstance(value, Tensor) else contents(value)
    if inside is None:
        yield where, value
    else:
        for key, item in inside:
            yield from leaves(item, f"{where}/{key}")


def batch_size(tree: Any) -> int | None:
    """Entries of the first tensor with several along its first dimension, else of the first one.

    ``None`` without a tensor that has dimensions, or where not all can be cut.
    """
    tensors = [leaf for _, leaf in leaves(tree) if isinstance(leaf, Tensor)]
    if any(x.layout != torch.strided or x.is_nested or is_distributed(x) for x in tensors):
        return None
    lengths = [len(x) for x in tensors if x.ndim]
    return next((length for length in lengths if length > 1), lengths[0] if lengths else None)


def signature(tree: Any) -> tuple[tuple[str, Hashable, str], ...]:
    """Return the places of the leaves, their kinds, and the values of numbers, words and the like.

    :func:`slice_batch` cuts the same tensors of batches of one signature, and no word or number among the arguments
    tells a forward to treat them differently.
    """
    size = batch_size(tree)

    def kind(leaf: Any) -> Hashable:
        if isinstance(leaf, Tensor):
            return leaf.ndim, leaf.ndim > 0 and len(leaf) == size
        return type(leaf).__qualname__

    return tuple((where, kind(leaf), _value(leaf)) for where, leaf in leaves(tree))


def _value(leaf: Any) -> str:
    """Return a number, a word or a member of an Enum as text that is the same in every process; otherwise an empty
    string.
    """
    if isinstance(leaf, Enum):
        return str(leaf.name or leaf.value)
    plain = next((known for known in (int, float, complex, str, bytes) if isinstance(leaf, known)), None)
    return "" if plain is None else plain.__repr__(leaf)


def slice_batch(tree: Any, which: Samples) -> Any:
    """Return a copy of the tree with some samples only, a range or a choice: tensors are cut that have as many entries
    as the batch has samples.
    """
    size = batch_size(tree)

    def some(x: Tensor) -> Tensor:
        chosen = x[which] if x.ndim and len(x) == size else x
        return chosen.detach().clone().requires_grad_(x.requires_grad)

    return tree_map(tree, some)


@dataclass(frozen=True)
class BatchSlice:
    """The first samples of a batch.

    Example:
        >>> portion = BatchSlice(samples=2, batch=8, common=frozenset({(0, 0)}))
        >>> portion.rows((0, 0), 12), portion.rows((1, 0), 96), portion.rows((1, 0), 97)
        (12, 24, None)
    """

    samples: int  # how many they are
    batch: int  # how many there are
    # calls, as (layer index, number of the call), whose outputs have no entry for each sample: position embeddings for
    # instance
    common: frozenset[tuple[int, int]] = frozenset()

    def rows(self, call: tuple[int, int], count: int) -> int | None:
        """Return how many of a call's first rows belong to these samples; ``None`` if that is no whole number."""
        if call in self.common:
            return count
        rows, rest = divmod(count * self.samples, self.batch)
        return None if rest else rows

    def whole(self, call: tuple[int, int], rows: int) -> int:
        """Return how many rows a call has of which these samples have so many."""
        return rows if call in self.common else rows * self.batch // self.samples
