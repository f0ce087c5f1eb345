"""Norms of matrices, all in one solve, and what the layers' inputs become in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spectral_monitor.anatomy import Layout
from spectral_monitor.engine.scalars import Scalars
from spectral_monitor.engine.settings import Settings
from spectral_monitor.engine.stacks import Stack
from spectral_monitor.functional.features import mean_alignment
from spectral_monitor.functional.lengths import largest, lengths
from spectral_monitor.linalg import Routine, abreast, frobenius, spectral_estimates
from spectral_monitor.quantities import QUANTITIES

PRODUCT_BUDGET = 1 << 25
"""Multiply-adds spent on the rows ``W h'`` of one layer; 64 rows are always used, and all with max_rows=None."""
MOST_ROWS = 256
"""Rows that are enough: what they have in common is seen in 256 to a few percent, and several processes send them."""

FROBENIUS_KEYS = frozenset({"weight_fro", "update_fro", "drift_fro_ratio"})
"""Quantities that need no spectral norm."""


def rows_worth(layout: Layout) -> int:
    """How many rows of inputs the alignments of a layer are worth."""
    weights = layout.taps * layout.blocks * layout.fan_out * layout.fan_in
    return min(MOST_ROWS, max(64, PRODUCT_BUDGET // max(weights, 1)))


class Job(NamedTuple):
    """Matrices of some layers, and what is measured of them.

    Attributes:
        stack: the matrices.
        name: of the raw scalars: ``W`` before the update, ``dW``, ``W1`` after it, ``drift`` or ``W0`` at the start.
    """

    stack: Stack
    name: str


NEEDS = {"W": "W", "dW": "dW", "W1": "W1", "drift": "W0", "W0": "W0"}
"""What a quantity needs that is read off these matrices."""
MAPS = {"W": ("alignment", ""), "dW": ("update_alignment", "feature_change_local")}
"""Quantities that say what matrices make of the layers' inputs: how well they are aligned, and their length."""


class MatrixNorms:
    """Puts raw scalars of matrices: norms by name, and what the layers' inputs become in them."""

    def __init__(self, settings: Settings, inputs: Callable[[int], Tensor | None], out: Scalars) -> None:
        self._settings = settings
        self._inputs = inputs
        self._out = out

    def measure(self, jobs: Sequence[Job]) -> Routine[None]:
        """Measure everything at once: one solve for all spectral norms."""
        wanted = [job for job in jobs if self._quantities(job)]
        spectral = [job for job in wanted if not self._quantities(job) <= FROBENIUS_KEYS]
        others = [job for job in wanted if job not in spectral]
        mapped = [job for job in jobs if set(MAPS.get(job.name, ())) & set(self._settings.keys)]
        routines: list[Routine[Any]] = [
            spectral_estimates([job.stack.pieces for job in spectral], self._settings.tol, bounds=False),
            abreast([job.stack.pieces.combined(frobenius, 2) for job in others]),
            abreast([self._row_norms(job) for job in wanted]),
            abreast([self._mapped(job) for job in mapped]),
        ]
        estimates, fros, _, products = yield from abreast(routines)
        sigmas = {job: found.sigma for job, found in zip(spectral, estimates, strict=True)}
        norms = {job: found.fro for job, found in zip(spectral, estimates, strict=True)}
        norms.update(zip(others, fros, strict=True))
        for job in wanted:
            for i, span in job.stack.spans.items():
                self._out.put(i, f"{job.name}.fro", norms[job][span])
                if job in sigmas:
                    self._out.put(i, f"{job.name}.sigma", sigmas[job][span])
        for job, found in zip(mapped, products, strict=True):
            self._put_maps(job, found, sigmas.get(job))

    def _quantities(self, job: Job) -> set[str]:
        """Return the quantities that norms of these matrices are needed for."""
        return {key for key in self._settings.keys if NEEDS[job.name] in QUANTITIES[key].needs} - {"contribution"}

    def _row_norms(self, job: Job) -> Routine[None]:
        """Put the largest RMS over the rows of embedding tables."""
        stack, across = job.stack, job.stack.split[1]
        tables = [i for i, member in stack.members.items() if member.layer.info.role == "embedding"]
        if not tables:
            return
        found = []
        for i in tables:
            rows = stack.like.new_zeros(stack.members[i].count, stack.shape[1], dtype=torch.float64)
            for rectangle, part in stack.parts(i):
                first, last = rectangle.index, rectangle.index + rectangle.count
                rows[first:last, slice(*rectangle.rows)] = lengths(part).square() if across else lengths(part)
            found.append(rows)
        if stack.exchange is not None:
            found = yield found
        for i, rows in zip(tables, found, strict=True):
            longest = rows.amax()
            self._out.put(i, f"{job.name}.row", (longest.sqrt() if across else longest) / stack.shape[2] ** 0.5)

    def _mapped(self, job: Job) -> Routine[dict[int, tuple[Tensor, Tensor]]]:
        """Return lengths (taps, blocks, R) of ``A x``, and (blocks or 1, R) of the layers' inputs ``x``."""
        stack = job.stack
        if stack.exchange is not None:
            yield []  # the inputs are on their way
        found: dict[int, tuple[Tensor, Tensor]] = {}
        products: list[Tensor] = []
        for i, member in stack.members.items():
            rows = self._inputs(i) if member.layer.info.role in ("operator", "readout") else None
            if rows is not None and len(rows):
                rows = rows.to(stack.like, copy=True)
                size = largest(rows, 1)
                x = member.layer.layout.inputs(rows.div_(size))  # products are then as large as the matrices are
                found[i] = size.squeeze(1), lengths(x)
                products.append(_products(stack, i, x))
        across = stack.split[1]
        if stack.exchange is not None and products:
            products = yield products if across else [product.square() for product in products]
            products = [lengths(y) if across else y.sqrt() for y in products]
        result = {}
        for (i, (sizes, of_x)), of_Ax in zip(found.items(), products, strict=True):
            layout = stack.members[i].layer.layout
            result[i] = of_Ax.view(layout.taps, layout.blocks, -1) * sizes, of_x * sizes
        return result

    def _put_maps(self, job: Job, found: Mapping[int, tuple[Tensor, Tensor]], sigma: Tensor | None) -> None:
        """Put alignments, and lengths of what matrices make of the inputs."""
        alignment, length = MAPS[job.name]
        for i, (products, x) in found.items():
            layout = job.stack.members[i].layer.layout
            if alignment in self._settings.keys and sigma is not None:
                norms = sigma[job.stack.spans[i]].view(layout.taps, layout.blocks)
                self._out.put(i, alignment, mean_alignment(products, x, norms))
            if length in self._settings.keys and layout.taps == 1:
                self._out.put(i, f"{job.name}.h", (products.square().sum() / products.shape[2]).sqrt())


def _products(stack: Stack, i: int, x: Tensor) -> Tensor:
    """What a layer's matrices make of rows (blocks or 1, R, n), as far as they are here.

    The lengths (count, R) of the rows ``A x``, float64; where columns are split the rows themselves (count, R, m), to
    be summed.
    """
    layout, (_, m, _) = stack.members[i].layer.layout, stack.shape
    size = (stack.members[i].count, x.shape[1])
    total = x.new_zeros((*size, m)) if stack.split[1] else x.new_zeros(size, dtype=torch.float64)
    for rectangle, part in stack.parts(i):
        some = x[:, :, slice(*rectangle.cols)]
        first, last = rectangle.index, rectangle.index + rectangle.count
        if len(x) == 1:  # all see the same inputs: one product, which is far faster
            rows = some[0] @ part.flatten(0, 1).T
            product = rows.view(x.shape[1], rectangle.count, -1).transpose(0, 1)
        else:
            product = some[torch.arange(first, last, device=x.device) % layout.blocks] @ part.mT
        if stack.split[1]:
            total[first:last, :, slice(*rectangle.rows)] = product
        else:  # of all rows that come one after the other
            total[first:last] = torch.hypot(total[first:last], lengths(product))
    return total
