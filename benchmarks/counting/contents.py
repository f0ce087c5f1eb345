"""Follows through operators which memory holds W, dW and W - W0 of which parameter, and how often it is read.

Contents are linear combinations of a parameter's values before the step, after it and at the start: copies hold the
same, sums and differences add up. So it does not matter where a program keeps its copies, or in how many parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

Values = tuple[tuple[str, int], ...]
"""A linear combination of ``before``, ``after`` and ``start``."""

NAMES: dict[Values, str] = {
    (("before", 1),): "W",
    (("after", 1), ("before", -1)): "dW",
    (("after", 1), ("start", -1)): "drift",
}
"""What measured matrices are made of."""
COPIES = frozenset({"copy", "clone", "to_copy", "contiguous", "resolve_conj"})
WRITES_ONLY = frozenset({"copy", "fill", "zero", "normal", "uniform", "index_put"})
"""In place, these do not read what they overwrite (``index_put`` does not read it all)."""


def basic(name: str) -> str:
    """``aten::_foreach_sub_`` is a ``sub``."""
    return name.removeprefix("aten::").removeprefix("_foreach_").strip("_")


def extent(t: Tensor) -> tuple[int, int]:
    """First byte of the storage that is the tensor's, and the one after the last."""
    first = t.storage_offset() * t.element_size()
    if t.numel() == 0:
        return first, first
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return first, first + (last + 1) * t.element_size()


def blocks(t: Tensor) -> Iterator[tuple[int, int]]:
    """The bytes of a storage that are the tensor's, first and one after the last of each stretch without holes."""
    dims = sorted(((stride, size) for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1 and stride))
    stretch, dense = 1, 0
    for stride, size in dims:
        if stride > stretch:
            break
        stretch, dense = stretch + (size - 1) * stride, dense + 1
    starts = [t.storage_offset()] if t.numel() else []
    for stride, size in dims[dense:]:
        starts = [start + k * stride for start in starts for k in range(size)]
    for start in starts:
        yield start * t.element_size(), (start + stretch) * t.element_size()


def read_bytes(t: Tensor) -> int:
    """Different bytes a tensor consists of: expanded ones count once."""
    first, last = extent(t)
    return min(t.numel() * t.element_size(), last - first)


@dataclass(frozen=True)
class Region:
    """Bytes of a storage and whose values they hold."""

    first: int
    last: int
    name: str
    values: Values


@dataclass
class Contents:
    """What is where.

    Attributes:
        passes: (matrix, parameter) -> place in the code -> how often all of it was read there.
    """

    regions: dict[int, list[Region]] = field(default_factory=dict)
    owners: dict[int, str] = field(default_factory=dict)
    passes: dict[tuple[str, str], Counter[str]] = field(default_factory=dict)

    def watch(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Follow these parameters."""
        for name, p in parameters:
            key = p.untyped_storage()._cdata
            self.owners[key] = name
            self.regions[key] = [Region(*extent(p), name, (("before", 1),))]

    def begin(self) -> None:
        """A step begins: what is in the parameters is what was before; copies are of the start."""
        self.passes.clear()
        for key, regions in self.regions.items():
            values: Values = (("before" if key in self.owners else "start", 1),)
            self.regions[key] = [Region(r.first, r.last, r.name, values) for r in regions if len(r.values) == 1]

    def forget(self, key: int) -> None:
        """A storage is gone."""
        self.regions.pop(key, None)

    def within(self, t: Tensor) -> list[Region]:
        """The regions a tensor overlaps."""
        first, last = extent(t)
        regions = self.regions.get(t.untyped_storage()._cdata, ())
        return [r for r in regions if r.first < last and first < r.last]

    def names(self, t: Tensor) -> list[tuple[str, str]]:
        """The measured matrices a tensor is of."""
        return [(NAMES[r.values], r.name) for r in self.within(t) if r.values in NAMES]

    def read(self, tensors: Iterable[Tensor], function: str) -> None:
        """An operator has read these."""
        shares: Counter[tuple[str, str]] = Counter()
        for t in {(t.untyped_storage()._cdata, extent(t), t.numel()): t for t in tensors}.values():
            measured = [r for r in self.within(t) if r.values in NAMES]
            for r in measured:
                overlap = sum(max(0, min(last, r.last) - max(first, r.first)) for first, last in blocks(t))
                shares[(NAMES[r.values], r.name)] += overlap / (r.last - r.first)
        for key, share in shares.items():
            self.passes.setdefault(key, Counter())[function] += share

    def write(self, name: str, inputs: Sequence[Any], alpha: float, out: Tensor) -> None:
        """An operator has written ``out``, in place or not, from these."""
        key = out.untyped_storage()._cdata
        first, last = extent(out)
        new_contents = dict(self._made(name, inputs, alpha, out)) if self._known(inputs) else {}
        untouched = [r for r in self.regions.get(key, ()) if r.last <= first or last <= r.first]
        if key in self.owners:  # whatever changes a parameter makes it the one after the step
            new_contents = {(first, last): (self.owners[key], (("after", 1),))}
        if new_contents or untouched or key in self.regions:
            self.regions[key] = [*untouched, *(Region(*span, *contents) for span, contents in new_contents.items())]

    def _known(self, inputs: Sequence[Any]) -> bool:
        return any(t.untyped_storage()._cdata in self.regions for t in inputs if isinstance(t, Tensor))

    def _made(
        self, name: str, inputs: Sequence[Any], alpha: float, out: Tensor
    ) -> Iterator[tuple[tuple[int, int], tuple[str, Values]]]:
        factors = {"sub": (1, -alpha), "add": (1, alpha), "neg": (-1,)}.get(name, (1,) if name in COPIES else ())
        tensors = inputs[: len(factors)]
        if not factors or not all(isinstance(t, Tensor) and t.numel() == out.numel() for t in tensors):
            return
        terms = [{span: (r.name, r.values) for span, r in self._elements(t)} for t in tensors]
        first = out.storage_offset() * out.element_size()
        for span in terms[0]:
            if all(span in term and term[span][0] == terms[0][span][0] for term in terms):
                total: Counter[str] = Counter()
                for factor, term in zip(factors, terms, strict=True):
                    for version, count in term[span][1]:
                        total[version] += int(factor) * count
                values = tuple(sorted((version, count) for version, count in total.items() if count))
                a, b = (first + element * out.element_size() for element in span)
                yield (a, b), (terms[0][span][0], values)

    def _elements(self, t: Tensor) -> Iterator[tuple[tuple[int, int], Region]]:
        """The parts of a tensor whose contents are known, in elements."""
        first, last = extent(t)
        for r in self.within(t):
            span = (max(first, r.first) - first, min(last, r.last) - first)
            yield (span[0] // t.element_size(), span[1] // t.element_size()), r


def tensors_in(value: Any) -> list[Tensor]:
    """Tensors among an operator's arguments or results, lists taken apart."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [t for item in value for t in tensors_in(item)]
    return []
