"""The samples of a batch: of nested containers of tensors, those that have an entry for each."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from spectral_monitor.snapshot.local import is_distributed


def mapped(value: Any, of: Callable[[Tensor], Tensor]) -> Any:
    """A copy of nested containers with ``of`` each tensor; anything else is shared."""
    if isinstance(value, Tensor):
        return of(value)
    if isinstance(value, tuple):
        items = [mapped(item, of) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [mapped(item, of) for item in value]
    if _is_dict(value):
        copied = copy.copy(value)
        copied.update((key, mapped(item, of)) for key, item in value.items())
        return copied
    if _wraps_dict(value):
        wrapper = copy.copy(value)
        wrapper.data = mapped(wrapper.data, of)
        return wrapper
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: mapped(getattr(value, f.name), of) for f in fields(value) if f.init})
    return value


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict) and type(value).__module__ in ("builtins", "collections")


def _wraps_dict(value: Any) -> bool:
    """Whether it is a UserDict, a BatchEncoding or the like."""
    return isinstance(value, Mapping) and isinstance(getattr(value, "data", None), dict)


def leaves(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """What :func:`mapped` maps or shares, and where it is."""
    inside: Iterable[tuple[object, Any]] | None = None
    if isinstance(value, (tuple, list)):
        inside = enumerate(value)
    elif _is_dict(value) or _wraps_dict(value):
        inside = value.items()
    elif is_dataclass(value) and not isinstance(value, type):
        inside = ((f.name, getattr(value, f.name)) for f in fields(value) if f.init)
    if inside is None:
        yield where, value
    else:
        for key, item in inside:
            yield from leaves(item, f"{where}/{key}")


def batch_size(tree: Any) -> int | None:
    """Entries of the first tensor along its first dimension; ``None`` without one, or where not all can be cut."""
    tensors = [leaf for _, leaf in leaves(tree) if isinstance(leaf, Tensor)]
    if any(x.layout != torch.strided or x.is_nested or is_distributed(x) for x in tensors):
        return None
    return next((len(x) for x in tensors if x.ndim), None)


def signature(tree: Any) -> Hashable:
    """What two batches have in common of which :func:`cut` cuts the same tensors."""
    size = batch_size(tree)

    def kind(leaf: Any) -> Hashable:
        if isinstance(leaf, Tensor):
            return leaf.ndim, leaf.ndim > 0 and len(leaf) == size
        return leaf if isinstance(leaf, bool) else type(leaf).__qualname__

    return tuple((where, kind(leaf)) for where, leaf in leaves(tree))


def cut(tree: Any, which: slice) -> Any:
    """A copy of the tree with some samples only: of tensors with as many entries as the batch has samples."""
    size = batch_size(tree)

    def some(x: Tensor) -> Tensor:
        chosen = x[which] if x.ndim and len(x) == size else x
        return chosen.detach().clone().requires_grad_(x.requires_grad)

    return mapped(tree, some)


@dataclass(frozen=True)
class Portion:
    """The first samples of a batch.

    Attributes:
        samples: how many they are.
        batch: how many there are.
        common: calls, as (layer index, number of the call), whose outputs have no entry for each sample: position
            embeddings for instance.

    Example:
        >>> portion = Portion(samples=2, batch=8, common=frozenset({(0, 0)}))
        >>> portion.rows((0, 0), 12), portion.rows((1, 0), 96), portion.rows((1, 0), 97)
        (12, 24, None)
    """

    samples: int
    batch: int
    common: frozenset[tuple[int, int]] = frozenset()

    def rows(self, call: tuple[int, int], count: int) -> int | None:
        """How many of a call's rows, the first ones, are of these samples; ``None`` if that is no whole number."""
        if call in self.common:
            return count
        rows, rest = divmod(count * self.samples, self.batch)
        return None if rest else rows
