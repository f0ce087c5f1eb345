"""Norms of matrices, all in one solve, and what the layers' inputs become in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from spectral_monitor.engine.results.raw import RawScalars
from spectral_monitor.engine.settings import Settings
from spectral_monitor.engine.weights.matrix_batches import MatrixBatch
from spectral_monitor.functional.features import (
    mean_alignment,
    mean_alignment_error,
    standard_error_of_mean,
    underflow_share,
)
from spectral_monitor.functional.standard_errors import GROUPS
from spectral_monitor.functional.vector_norms import largest, lengths
from spectral_monitor.layers import Layout
from spectral_monitor.linalg import Coroutine, frobenius, gather, spectral_estimates
from spectral_monitor.quantities import QUANTITIES

PRODUCT_BUDGET = 1 << 25
"""Multiply-adds spent on the rows ``W h'`` of one layer; 64 rows are always used, and all with max_rows=None."""
RATIO_BUDGET = 1 << 18
"""Rows times matrices of one shape whose alignments are taken: of a depthwise convolution's thousands few rows do."""
FILLED = 1 << 16
"""Entries that may be zeros so that several shapes are computed with at once."""
MOST_ROWS = 256
"""Rows that are enough: what they have in common is seen in 256 to a few percent, and several processes send them."""


def rows_worth(layout: Layout) -> int:
    """Return how many rows of inputs the alignments of a layer use."""
    weights = layout.taps * layout.blocks * layout.fan_out * layout.fan_in
    return min(MOST_ROWS, max(64, PRODUCT_BUDGET // max(weights, 1)))


class Job(NamedTuple):
    """Matrices of some layers, and what is measured of them."""

    stack: MatrixBatch  # the matrices
    # of the raw scalars: ``W`` before the update, ``dW``, ``W1`` after it, ``drift`` or ``W0`` at the start, or ``g``,
    # the gradient
    name: str


NEEDS = {"W": "W", "dW": "dW", "W1": "W1", "drift": "W0", "W0": "W0", "g": "|g|"}
"""What a quantity needs that is read off these matrices."""
MAPS = {"W": ("alignment", ""), "dW": ("update_alignment", "feature_change_local")}
"""Quantities that say what matrices make of the layers' inputs: how well they are aligned, and their length.

Spectral norms are taken for all of them.
"""


class MatrixNorms:
    """Puts raw scalars of matrices: norms by name, and what the layers' inputs become in them.

    Attributes:
        samples: of how many samples the inputs are all rows, or a choice of them; 0 for a choice of rows of the batch.
    """

    def __init__(self, settings: Settings, inputs: Callable[[int], Tensor | None], out: RawScalars) -> None:
        self._settings = settings
        self._inputs = inputs
        self._inputs_of: dict[tuple[int, ...], _Rows | None] = {}
        self._out = out
        self.samples = 0

    def measure(self, jobs: Sequence[Job]) -> Coroutine[None]:
        """Measure everything at once: one solve for all spectral norms."""
        wanted = [job for job in jobs if self._quantities(job)]
        spectral = [job for job in wanted if not all(QUANTITIES[key].by_frobenius for key in self._quantities(job))]
        others = [job for job in wanted if job not in spectral]
        mapped = [job for job in jobs if set(MAPS.get(job.name, ())) & set(self._settings.keys)]
        routines: list[Coroutine[Any]] = [
            spectral_estimates([job.stack.pieces for job in spectral], self._settings.tol, bounds=False),
            gather([job.stack.pieces.combined(frobenius, 2) for job in others]),
            gather([routine for job in wanted for routine in (self._row_norms(job), self._underflow(job))]),
            gather([self._mapped(job) for job in mapped]),
        ]
        estimates, fros, _, products = yield from gather(routines)
        sigmas = {job: found.sigma for job, found in zip(spectral, estimates, strict=True)}
        norms = {job: found.fro for job, found in zip(spectral, estimates, strict=True)}
        norms.update(zip(others, fros, strict=True))
        for job in wanted:
            self._out.put_each(f"{job.name}.fro", job.stack.spans, norms[job])
            if job in sigmas:
                self._out.put_each(f"{job.name}.sigma", job.stack.spans, sigmas[job])
        for some in _alike([x for x in products if x is not None]):
            self._put_maps(some, sigmas)
        for job in mapped:
            if job.name == "dW":
                self._inputs_of.pop(tuple(job.stack.members), None)

    def _quantities(self, job: Job) -> set[str]:
        """Return the quantities that norms of these matrices are needed for."""
        return {key for key in self._settings.keys if NEEDS[job.name] in QUANTITIES[key].needs} - {"contribution"}

    def _row_norms(self, job: Job) -> Coroutine[None]:
        """Put the largest RMS over the rows of embedding tables, and the largest row of output layers."""
        stack, across = job.stack, job.stack.split[1]
        roles = {"embedding", "readout"} if job.name == "W" and "readout_row" in self._settings.keys else {"embedding"}
        tables = [i for i, member in stack.members.items() if member.layer.info.role in roles]
        if not tables:
            return
        found = []
        # Squares need the range of float64, and one such tensor has all that goes with it sent as float64.
        wide = torch.float64 if across or stack.exchange is None else stack.like.dtype
        for i in tables:
            rows = stack.like.new_zeros(stack.members[i].count, stack.shape[1], dtype=wide)
            for rectangle, part in stack.parts(i):
                first, last = rectangle.index, rectangle.index + rectangle.count
                rows[first:last, slice(*rectangle.rows)] = lengths(part).square() if across else lengths(part)
            found.append(rows)
        found = yield found
        for i, rows in zip(tables, found, strict=True):
            longest = rows.amax().sqrt() if across else rows.amax()
            if stack.members[i].layer.info.role == "readout":
                self._out.put(i, "readout_row", longest * stack.shape[2] ** 0.5)
            else:
                self._out.put(i, f"{job.name}.row", longest / stack.shape[2] ** 0.5)

    def _underflow(self, job: Job) -> Coroutine[None]:
        """Put the share of entries that are lost in 8 bits; of several processes the mean over those with a part."""
        stack = job.stack
        if job.name != "W" or "underflow_weights" not in self._settings.keys:
            return
        shares = stack.like.new_zeros(len(stack.members), 2)
        for k, i in enumerate(stack.members):
            if stack.places[i]:
                shares[k] = torch.stack([underflow_share(stack.entries(i), torch.float8_e4m3fn), shares.new_ones(())])
        (shares,) = yield [shares]
        for i, (total, count) in zip(stack.members, shares, strict=True):
            self._out.put(i, "underflow_weights", total / count)

    def _mapped(self, job: Job) -> Coroutine[_Mapped | None]:
        """Return what the matrices make of the layers' inputs; ``None`` if there are no inputs."""
        stack = job.stack
        if stack.exchange is not None:
            yield []  # the inputs are on their way
        rows = self._rows(stack)
        if rows is None:
            return None
        products = stack.pieces.times(rows.x)  # (K, R, m), what is here of them
        if stack.exchange is None:
            return _Mapped(job, rows, lengths(products))
        if stack.split[1]:
            (whole,) = yield [products]
            return _Mapped(job, rows, lengths(whole))
        (squares,) = yield [lengths(products).square()]
        return _Mapped(job, rows, squares.sqrt())

    def _rows(self, stack: MatrixBatch) -> _Rows | None:
        """Return input rows for each matrix of a stack, which are the same for weights and updates."""
        key = tuple(stack.members)
        if key not in self._inputs_of:
            most = None if self._settings.max_rows is None else max(1, RATIO_BUDGET // stack.matrices)
            self._inputs_of[key] = _rows_of(stack, self._inputs, most)
        return self._inputs_of[key]

    def _put_maps(self, found: Sequence[_Mapped], sigmas: Mapping[Job, Tensor]) -> None:
        """Put alignments, and lengths of what matrices make of the inputs; ``sigmas``: their norms (K,)."""
        wanted = set(self._settings.keys)
        # The matrices of all stacks side by side, (K, R): rows that are missing are zero and do not count.
        longest = max(some.products.shape[1] for some in found)
        products = _side_by_side([some.products for some in found], longest)
        lengths_of = _side_by_side([some.rows.lengths for some in found], longest)
        sigma = torch.cat([sigmas[some.job] for some in found])
        aligned = mean_alignment(products, lengths_of, sigma)
        squares = None
        if any(length in wanted for _, length in MAPS.values()):
            sizes = _side_by_side([some.rows.sizes for some in found], longest)
            squares = (products * sizes).square()
        errors = off = None
        there = lengths_of > 0
        if self._settings.max_rows is not None or self.samples:
            groups = None if not self.samples else _groups(found, min(GROUPS, self.samples), lengths_of)
            errors = mean_alignment_error(products, lengths_of, sigma, groups)
            if squares is not None:  # of the root, relative to it
                off = standard_error_of_mean(squares, there, groups) * there.sum(1) / squares.sum(1) / 2
        first = 0
        for job, rows, some in found:
            alignment, length = MAPS[job.name]
            for i, count in rows.counts.items():
                span = slice(first + job.stack.spans[i].start, first + job.stack.spans[i].stop)
                if alignment in wanted:
                    self._out.put(i, alignment, aligned[span])
                    if errors is not None:
                        self._out.put(i, f"{alignment}.error", errors[span])
                if squares is not None and length in wanted and job.stack.members[i].layer.layout.taps == 1:
                    self._out.put(i, f"{job.name}.h", squares[span].sum(1) / count)
                    if off is not None:
                        self._out.put(i, f"{job.name}.h.error", off[span])
            first += len(some)


def _alike(found: Sequence[_Mapped]) -> list[list[_Mapped]]:
    """Return what can stand side by side: filled up with zeros, none becomes both large and twice as large."""
    groups: list[list[_Mapped]] = []
    longest = 0
    for some in sorted(found, key=lambda some: (str(some.products.device), -some.products.shape[1])):
        matrices, rows = some.products.shape
        here = groups and groups[-1][0].products.device == some.products.device
        if not here or matrices * longest > max(FILLED, 2 * matrices * rows):
            groups.append([])
            longest = rows
        groups[-1].append(some)
    return groups


def _side_by_side(columns: Sequence[Tensor], longest: int) -> Tensor:
    """Return tensors (K, R), (K', R'), ... as one, filled up with zeros to so many columns."""
    return torch.cat([x if x.shape[1] == longest else pad(x, (0, longest - x.shape[1])) for x in columns])


def _groups(found: Sequence[_Mapped], groups: int, like: Tensor) -> Tensor:
    """Return the group (K, R) of samples each row is of, like some lengths; rows of a sample stand together."""
    counts = torch.ones(len(like), dtype=torch.long, device="cpu")
    first = 0
    for job, rows, some in found:
        for i, count in rows.counts.items():
            counts[first + job.stack.spans[i].start : first + job.stack.spans[i].stop] = count
        first += len(some)
    places = torch.arange(like.shape[1], device="cpu") * groups // counts[:, None]
    return places.clamp(max=groups - 1).to(like.device)  # what comes after them is zero and does not count


class _Rows(NamedTuple):
    """Input rows of the K matrices of a stack, as many for each, zeros where there are fewer."""

    x: Tensor  # (K, R, n), each row divided by its largest entry: products are then as large as the matrices are
    sizes: Tensor  # (K, R) what rows were divided by
    lengths: Tensor  # (K, R) of the rows of ``x``
    counts: dict[int, int]  # layer -> how many rows it has; only layers with inputs are there


class _Mapped(NamedTuple):
    """Lengths (K, R) of the products of matrices with input rows."""

    job: Job
    rows: _Rows
    products: Tensor


def _rows_of(stack: MatrixBatch, inputs: Callable[[int], Tensor | None], most: int | None) -> _Rows | None:
    """Return the input rows of a stack, at most so many of each layer; ``None`` if no layer has any."""
    found: dict[int, Tensor] = {}
    for i, member in stack.members.items():
        rows = inputs(i) if member.layer.info.is_dense else None
        if rows is not None and len(rows):
            found[i] = rows
    if not found:
        return None
    K, _, n = stack.shape
    if most is not None:
        found = {i: rows[:: -(-len(rows) // most)] for i, rows in found.items()}
    counts = {i: len(rows) for i, rows in found.items()}
    x = stack.like.new_zeros(K, max(counts.values()), n)
    for i, rows in found.items():
        layout = stack.members[i].layer.layout
        given = layout.inputs(rows.to(x))
        x[stack.spans[i], : len(rows)] = given if layout.taps == 1 else given.repeat(layout.taps, 1, 1)
    sizes = largest(x, 2)
    x /= sizes
    return _Rows(x, sizes.squeeze(2), torch.linalg.vector_norm(x, dim=2), counts)
