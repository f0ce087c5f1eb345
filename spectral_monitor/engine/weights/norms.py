"""Norms of matrices, all in one solve, and lengths of their products with the layers' inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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

PRODUCT_BUDGET = 1 << 24
"""Limit of the multiply-adds for the rows ``W h'`` of a layer; 64 rows are always used, all with max_rows=None."""
RATIO_BUDGET = 1 << 18
"""Limit of rows times matrices of one shape: for the thousands of a depthwise convolution few rows suffice."""
MAX_PADDED = 1 << 16
"""Entries, padding included, that are always computed in one call, whatever their shapes."""
MAX_ROWS = 256
"""Rows that suffice: 256 give alignments to a few percent, and processes have to send them."""


def rows_worth(layout: Layout) -> int:
    """Return the number of input rows that the alignments of a layer use."""
    weights = layout.taps * layout.blocks * layout.fan_out * layout.fan_in
    return min(MAX_ROWS, max(64, PRODUCT_BUDGET // max(weights, 1)))


class Job(NamedTuple):
    """Matrices of some layers that are measured."""

    stack: MatrixBatch
    name: str  # of the raw scalars: W before the step, dW, W1 after it, W0 at the start, drift, or g, the gradient


NEEDS = {"W": "W", "dW": "dW", "W1": "W1", "drift": "W0", "W0": "W0", "g": "|g|"}
"""Name of a job -> the need of the quantities that it measures."""
PRODUCT_KEYS = {"W": ("alignment", ""), "dW": ("update_alignment", "feature_change_local")}
"""Name of a job -> quantities of products with the layers' inputs, alignment and length; they need spectral norms."""


class MatrixNorms:
    """Puts raw scalars of matrices: norms, and values of their products with the layers' inputs.

    Attributes:
        samples: the number of samples that the input rows are from; 0 if they are chosen from all rows of the batch.
    """

    def __init__(self, settings: Settings, inputs: Callable[[int], Tensor | None], out: RawScalars) -> None:
        self._settings = settings
        self._inputs = inputs
        self._rows_cache: dict[tuple[int, ...], _Rows | None] = {}
        self._out = out
        self.samples = 0

    def measure(self, jobs: Sequence[Job]) -> Coroutine[None]:
        """Measure all jobs, with one solve for all spectral norms."""
        needed = [job for job in jobs if self._quantities(job)]
        spectral = [job for job in needed if not all(QUANTITIES[key].by_frobenius for key in self._quantities(job))]
        others = [job for job in needed if job not in spectral]
        multiplied = [job for job in jobs if set(PRODUCT_KEYS.get(job.name, ())) & set(self._settings.keys)]
        routines: list[Coroutine[Any]] = [
            spectral_estimates([job.stack.pieces for job in spectral], self._settings.tol, bounds=False),
            gather([job.stack.pieces.combined(frobenius, 2) for job in others]),
            gather([routine for job in needed for routine in (self._row_norms(job), self._underflow(job))]),
            gather([self._products(job) for job in multiplied]),
        ]
        estimates, fros, _, products = yield from gather(routines)
        sigmas = {job: estimate.sigma for job, estimate in zip(spectral, estimates, strict=True)}
        norms = {job: estimate.fro for job, estimate in zip(spectral, estimates, strict=True)}
        norms.update(zip(others, fros, strict=True))
        for job in needed:
            self._out.put_each(f"{job.name}.fro", job.stack.spans, norms[job])
            if job in sigmas:
                self._out.put_each(f"{job.name}.sigma", job.stack.spans, sigmas[job])
        for batch in _batches([x for x in products if x is not None]):
            self._put_products(batch, sigmas)
        for job in multiplied:
            if job.name == "dW":
                self._rows_cache.pop(tuple(job.stack.members), None)

    def _quantities(self, job: Job) -> set[str]:
        """Return the quantities that need norms of these matrices."""
        return {key for key in self._settings.keys if NEEDS[job.name] in QUANTITIES[key].needs} - {"contribution"}

    def _row_norms(self, job: Job) -> Coroutine[None]:
        """Put the largest RMS over the rows of embedding tables, and the largest row of output layers."""
        stack, columns_split = job.stack, job.stack.split[1]
        roles = {"embedding", "readout"} if job.name == "W" and "readout_row" in self._settings.keys else {"embedding"}
        tables = [i for i, member in stack.members.items() if member.layer.info.role in roles]
        if not tables:
            return
        row_norms = []
        # Squares need the range of float64. One float64 tensor makes all tensors of an exchange float64.
        dtype = torch.float64 if columns_split or stack.exchange is None else stack.like.dtype
        for i in tables:
            rows = stack.like.new_zeros(stack.members[i].count, stack.shape[1], dtype=dtype)
            for rectangle, part in stack.parts(i):
                first, last = rectangle.index, rectangle.index + rectangle.count
                rows[first:last, slice(*rectangle.rows)] = lengths(part).square() if columns_split else lengths(part)
            row_norms.append(rows)
        row_norms = yield row_norms
        for i, rows in zip(tables, row_norms, strict=True):
            longest = rows.amax().sqrt() if columns_split else rows.amax()
            if stack.members[i].layer.info.role == "readout":
                self._out.put(i, "readout_row", longest * stack.shape[2] ** 0.5)
            else:
                self._out.put(i, f"{job.name}.row", longest / stack.shape[2] ** 0.5)

    def _underflow(self, job: Job) -> Coroutine[None]:
        """Put the share of entries that are lost in 8 bits, as the mean over the processes with a part of the layer."""
        stack = job.stack
        if job.name != "W" or "underflow_weights" not in self._settings.keys:
            return
        shares = stack.like.new_zeros(len(stack.members), 2)
        for k, i in enumerate(stack.members):
            if stack.slots[i]:
                shares[k] = torch.stack([underflow_share(stack.entries(i), torch.float8_e4m3fn), shares.new_ones(())])
        (shares,) = yield [shares]
        for i, (total, count) in zip(stack.members, shares, strict=True):
            self._out.put(i, "underflow_weights", total / count)

    def _products(self, job: Job) -> Coroutine[_Products | None]:
        """Return the lengths of the products with the layers' inputs; ``None`` if there are no inputs."""
        stack = job.stack
        if stack.exchange is not None:
            yield []  # wait for the inputs
        rows = self._rows(stack)
        if rows is None:
            return None
        products = stack.pieces.times(rows.x)  # (K, R, m), this process's share
        if stack.exchange is None:
            return _Products(job, rows, lengths(products))
        if stack.split[1]:
            (products,) = yield [products]
            return _Products(job, rows, lengths(products))
        (squares,) = yield [lengths(products).square()]
        return _Products(job, rows, squares.sqrt())

    def _rows(self, stack: MatrixBatch) -> _Rows | None:
        """Return input rows for each matrix of a stack, the same for weights and updates."""
        key = tuple(stack.members)
        if key not in self._rows_cache:
            max_rows = None if self._settings.max_rows is None else max(1, RATIO_BUDGET // stack.full_count)
            self._rows_cache[key] = _rows_of(stack, self._inputs, max_rows)
        return self._rows_cache[key]

    def _put_products(self, batch: Sequence[_Products], sigmas: Mapping[Job, Tensor]) -> None:
        """Put alignments, and lengths of products with the inputs; ``sigmas``: the spectral norms (K,)."""
        keys = set(self._settings.keys)
        # The matrices of all stacks in one tensor (K, R): missing rows are zero and do not count.
        longest = max(products.lengths.shape[1] for products in batch)
        output_lengths = _padded([products.lengths for products in batch], longest)
        input_lengths = _padded([products.rows.lengths for products in batch], longest)
        sigma = torch.cat([sigmas[products.job] for products in batch])
        alignments = mean_alignment(output_lengths, input_lengths, sigma)
        squares = None
        if any(length in keys for _, length in PRODUCT_KEYS.values()):
            sizes = _padded([products.rows.sizes for products in batch], longest)
            squares = (output_lengths * sizes).square()
        alignment_errors = length_errors = None
        present = input_lengths > 0
        if self._settings.max_rows is not None or self.samples:
            groups = _sample_groups(batch, min(GROUPS, self.samples), input_lengths) if self.samples else None
            alignment_errors = mean_alignment_error(output_lengths, input_lengths, sigma, groups)
            if squares is not None:  # of the root, relative to it
                length_errors = standard_error_of_mean(squares, present, groups) * present.sum(1) / squares.sum(1) / 2
        for job, i, count, span in _spans(batch):
            alignment, length = PRODUCT_KEYS[job.name]
            if alignment in keys:
                self._out.put(i, alignment, alignments[span])
                if alignment_errors is not None:
                    self._out.put(i, f"{alignment}.error", alignment_errors[span])
            if squares is not None and length in keys and job.stack.members[i].layer.layout.taps == 1:
                self._out.put(i, f"{job.name}.h", squares[span].sum(1) / count)
                if length_errors is not None:
                    self._out.put(i, f"{job.name}.h.error", length_errors[span])


def _batches(parts: Sequence[_Products]) -> list[list[_Products]]:
    """Group products so that padding makes none of them both large and more than twice as large."""
    batches: list[list[_Products]] = []
    longest = 0
    for part in sorted(parts, key=lambda part: (str(part.lengths.device), -part.lengths.shape[1])):
        matrices, rows = part.lengths.shape
        same_device = batches and batches[-1][0].lengths.device == part.lengths.device
        if not same_device or matrices * longest > max(MAX_PADDED, 2 * matrices * rows):
            batches.append([])
            longest = rows
        batches[-1].append(part)
    return batches


def _padded(parts: Sequence[Tensor], columns: int) -> Tensor:
    """Return tensors (K, R), (K', R'), ... as one, padded with zeros to ``columns``."""
    return torch.cat([x if x.shape[1] == columns else pad(x, (0, columns - x.shape[1])) for x in parts])


def _spans(batch: Sequence[_Products]) -> Iterator[tuple[Job, int, int, slice]]:
    """Yield for each layer its job, index, number of rows, and the span of its matrices in the batch."""
    first = 0
    for job, rows, _ in batch:
        for i, count in rows.counts.items():
            yield job, i, count, slice(first + job.stack.spans[i].start, first + job.stack.spans[i].stop)
        first += job.stack.shape[0]


def _sample_groups(batch: Sequence[_Products], groups: int, like: Tensor) -> Tensor:
    """Return (K, R), the group of samples that each row belongs to; rows of a sample are consecutive."""
    counts = torch.ones(len(like), dtype=torch.long, device="cpu")
    for _, _, count, span in _spans(batch):
        counts[span] = count
    indices = torch.arange(like.shape[1], device="cpu") * groups // counts[:, None]
    return indices.clamp(max=groups - 1).to(like.device)  # rows beyond the count are zero and do not count


class _Rows(NamedTuple):
    """Input rows of the K matrices of a stack, padded with zeros to the same number."""

    x: Tensor  # (K, R, n), each row divided by its largest entry, so that products are as large as the matrices
    sizes: Tensor  # (K, R) the largest entries
    lengths: Tensor  # (K, R) of the rows of ``x``
    counts: dict[int, int]  # layer -> its number of rows; only layers with inputs


class _Products(NamedTuple):
    """Products of the K matrices of a job with input rows."""

    job: Job
    rows: _Rows
    lengths: Tensor  # (K, R)


def _rows_of(stack: MatrixBatch, inputs: Callable[[int], Tensor | None], max_rows: int | None) -> _Rows | None:
    """Return the input rows of a stack, at most ``max_rows`` of each layer; ``None`` if no layer has any."""
    rows_by_layer: dict[int, Tensor] = {}
    for i, member in stack.members.items():
        rows = inputs(i) if member.layer.info.is_dense else None
        if rows is not None and len(rows):
            rows_by_layer[i] = rows if max_rows is None else rows[:: -(-len(rows) // max_rows)]
    if not rows_by_layer:
        return None
    K, _, n = stack.shape
    counts = {i: len(rows) for i, rows in rows_by_layer.items()}
    x = stack.like.new_zeros(K, max(counts.values()), n)
    for i, rows in rows_by_layer.items():
        layout = stack.members[i].layer.layout
        matrix_inputs = layout.inputs(rows.to(x))
        x[stack.spans[i], : len(rows)] = matrix_inputs if layout.taps == 1 else matrix_inputs.repeat(layout.taps, 1, 1)
    sizes = largest(x, 2)
    x /= sizes
    return _Rows(x, sizes.squeeze(2), torch.linalg.vector_norm(x, dim=2), counts)
