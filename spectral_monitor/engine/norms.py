"""Norms of stacks of matrices, and what the layers' inputs become in them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from spectral_monitor.anatomy import Layout
from spectral_monitor.engine.patience import Patience
from spectral_monitor.engine.scalars import Scalars
from spectral_monitor.engine.settings import Settings
from spectral_monitor.engine.stacks import Stack
from spectral_monitor.engine.streams import Streamed
from spectral_monitor.functional.features import mean_alignment
from spectral_monitor.functional.lengths import largest, lengths
from spectral_monitor.linalg import (
    Routine,
    abreast,
    frobenius,
    in_cache,
    in_turn,
    joined_estimates,
    shared_estimate,
)
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


class StackNorms:
    """Puts raw scalars of stacks: norms by name, and alignments with the layers' inputs."""

    def __init__(
        self, settings: Settings, inputs: Callable[[int], Tensor | None], out: Scalars, patience: Patience | None
    ) -> None:
        """``patience``: for devices that are not to be waited for; without it they are."""
        self._patience = patience
        self._settings = settings
        self._inputs = inputs
        self._out = out

    def weight(self, stack: Stack) -> Routine[None]:
        """Of weights before the update."""
        yield from self._both(stack, "W", "alignment")

    def update(self, stack: Stack) -> Routine[None]:
        """Of updates."""
        yield from self._both(stack, "dW", "update_alignment", "feature_change_local")

    def after(self, stack: Stack) -> Routine[None]:
        """Of weights after the update."""
        yield from self._norms(stack, "W1", "W1")

    def drift(self, stack: Stack) -> Routine[None]:
        """Of the weights after the update less those at the start."""
        yield from self._norms(stack, "drift", "W0")

    def start(self, stack: Stack) -> Routine[None]:
        """Of the weights at the start."""
        yield from self._norms(stack, "W0", "W0")

    def _norms(self, stack: Stack, name: str, need: str) -> Routine[Tensor | None]:
        """The norms that some quantity with this need is read off; spectral ones are returned too."""
        wanted = {key for key in self._settings.keys if need in QUANTITIES[key].needs} - {"contribution"}
        if not wanted:
            return None
        sigma = None
        if wanted <= FROBENIUS_KEYS:
            fro = yield from stack.pieces.combined(frobenius, 2)
        elif self._patience is not None and self._patience.is_needed(stack.like.device, stack.exchange):
            places = {(i, name): span for i, span in stack.spans.items()}
            sigma, fro = self._patience.estimate(stack.pieces, places, self._settings.tol, self._out)
        else:
            run = in_turn if stack.exchange is None else abreast
            pieces = stack.pieces
            cut = (
                [pieces] if isinstance(pieces, Streamed) else in_cache(pieces)
            )  # what is streamed goes by small pieces
            found = yield from run([shared_estimate(part, self._settings.tol, bounds=False) for part in cut])
            estimate = joined_estimates(found)
            sigma, fro = estimate.sigma, estimate.fro
        for i, span in stack.spans.items():
            self._out.put(i, f"{name}.fro", fro[span])
            if sigma is not None:
                self._out.put(i, f"{name}.sigma", sigma[span])
        tables = [i for i, member in stack.members.items() if member.layer.info.role == "embedding"]
        if tables:
            yield from self._row_norms(stack, name, tables)
        return sigma

    def _row_norms(self, stack: Stack, name: str, tables: list[int]) -> Routine[None]:
        """The largest RMS over the rows of embedding tables."""
        across = stack.split[1]
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
            self._out.put(i, f"{name}.row", (longest.sqrt() if across else longest) / stack.shape[2] ** 0.5)

    def _both(self, stack: Stack, name: str, key: str, length: str = "") -> Routine[None]:
        """Norms and, side by side if others take part, what the matrices make of the layers' inputs."""
        stretched: dict[int, tuple[Tensor, Tensor]] = {}
        sigma: list[Tensor | None] = []
        routines = [self._kept(self._norms(stack, name, name), sigma)]
        if {key, length} & set(self._settings.keys):
            routines.append(self._stretch(stack, stretched))
        yield from (in_turn if stack.exchange is None else abreast)(routines)
        for i, (products, x) in stretched.items():
            layout = stack.members[i].layer.layout
            if key in self._settings.keys and sigma[0] is not None:
                norms = sigma[0][stack.spans[i]].view(layout.taps, layout.blocks)
                self._out.put(i, key, mean_alignment(products, x, norms))
            if length in self._settings.keys and layout.taps == 1:
                self._out.put(i, f"{name}.h", (products.square().sum() / products.shape[2]).sqrt())

    def _kept(self, routine: Routine[Tensor | None], result: list[Tensor | None]) -> Routine[None]:
        result.append((yield from routine))

    def _stretch(self, stack: Stack, result: dict[int, tuple[Tensor, Tensor]]) -> Routine[None]:
        """Lengths (taps, blocks, R) of ``A x``, and (blocks or 1, R) of the layers' inputs ``x``."""
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
        for (i, (sizes, of_x)), of_Ax in zip(found.items(), products, strict=True):
            layout = stack.members[i].layer.layout
            result[i] = of_Ax.view(layout.taps, layout.blocks, -1) * sizes, of_x * sizes


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
