"""Drawn matrices: their spectra, shapes, dtypes and sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DECADES = {torch.float64: (-290, 290), torch.float32: (-30, 36), torch.bfloat16: (-30, 36), torch.float16: (-4, 3)}
"""Powers of ten at which the largest singular value of a drawn matrix lies."""
LOWEST = {torch.float64: -290, torch.float32: -44, torch.bfloat16: -40, torch.float16: -7}
"""The same down to where only the last digits of entries are left."""
LONGEST = 100
"""Longest side: more than the 72 up to which norms come from a Gram matrix."""

sides = st.one_of(st.integers(1, 12), st.integers(68, 76), st.integers(74, LONGEST))
seeds = st.integers(0, 2**31)
dtypes = st.sampled_from(DTYPES)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int]:
    """Rows, columns, tall, wide and square matrices."""
    m, n = draw(sides), draw(sides)
    return draw(st.sampled_from([(1, n), (m, 1), (m, n), (n, m), (m, m)]))


@st.composite
def spectra(draw: st.DrawFn, size: int) -> Tensor:
    """So many singular values, the largest first and 1, or all 0."""
    kind = draw(st.sampled_from(["decades", "repeated", "gap", "spike", "bulk", "zero"]))
    rank = draw(st.integers(1, size))
    steps = torch.arange(size, dtype=torch.float64)
    if kind == "decades":  # as far apart as float64 and beyond
        values = 10.0 ** (-draw(st.floats(0.1, 40)) * steps / max(size - 1, 1))
    elif kind == "repeated":  # the largest, some times; the others all the same
        values = torch.where(steps < rank, 1.0, draw(st.floats(0, 1)))
    elif kind == "gap":
        values = torch.where(steps < 1, 1.0, 1 - draw(st.floats(2e-3, 5e-2)))
    elif kind == "spike":
        values = torch.where(steps < 1, 1.0, draw(st.floats(0, 1e-3)))
    elif kind == "bulk":
        values = 1 - draw(st.floats(0, 1)) * steps / size
    else:
        return torch.zeros(size, dtype=torch.float64)
    if draw(st.booleans()):  # rank-deficient
        values[rank:] = 0
    return values.double()


def orthogonal(size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q


def placed(values: Tensor, m: int, n: int, left: Tensor | None, right: Tensor | None) -> Tensor:
    """The matrix (m, n) with these singular values and vectors, by default those of the axes."""
    A = torch.zeros(m, n, dtype=torch.float64)
    A.diagonal()[:] = values
    A = A if left is None else left @ A
    return A if right is None else A @ right.T


@dataclass(frozen=True)
class Drawn:
    """A stack of matrices and what is known of it.

    Attributes:
        A: (K, m, n), rounded to its dtype.
        unit: what its entries were multiplied by, a power of two.
        values: (K, min(m, n)) singular values of the rounded matrices over ``unit``, float64.
    """

    A: Tensor
    unit: float
    values: Tensor

    @property
    def truth(self) -> Tensor:
        """(K,) largest singular values."""
        return self.values[:, 0] * self.unit

    @property
    def fro(self) -> Tensor:
        """(K,) Frobenius norms."""
        return self.values.norm(dim=1) * self.unit

    @property
    def eps(self) -> float:
        """Relative rounding of the dtype that norms are computed in."""
        return torch.finfo(torch.float64 if self.A.dtype == torch.float64 else torch.float32).eps

    @property
    def last_digit(self) -> float:
        """The smallest positive number of that dtype: what tiny results are rounded to."""
        return 5e-324 if self.A.dtype == torch.float64 else 1.5e-45

    def __repr__(self) -> str:
        return f"Drawn({self.A.dtype}, {tuple(self.A.shape)}, unit={self.unit}, values={self.values})"


def drawn(A: Tensor, dtype: torch.dtype, unit: float) -> Drawn:
    """Round matrices of order 1 times a power of two, and measure what came of it."""
    rounded = (A * unit).to(dtype)
    return Drawn(rounded, unit, torch.linalg.svdvals(rounded.double() / unit))


def but_for_bad_starts(holds: Callable[[Drawn], bool], x: Drawn) -> bool:
    """Whether an estimate is right, or is so for 19 of 20 other sets of singular vectors.

    An estimate may be off by more than its tolerance for one random start in a hundred, so for as many matrices of the
    same singular values. Examples are searched for, so the one in a hundred is found.
    """
    if holds(x):
        return True
    n = x.A.shape[2]
    turned = ((x.A.double() / x.unit) @ orthogonal(n, seed) for seed in range(20))
    return sum(holds(drawn(A, x.A.dtype, x.unit)) for A in turned) >= 19


@st.composite
def units(draw: st.DrawFn, dtype: torch.dtype, subnormal: bool = False) -> float:
    """Powers of two over all decades that the dtype holds."""
    low, high = DECADES[dtype]
    low = LOWEST[dtype] if subnormal else low
    return 2.0 ** draw(st.integers(math.ceil(low * math.log2(10)), math.floor(high * math.log2(10))))


@st.composite
def stacks(draw: st.DrawFn, subnormal: bool = False) -> Drawn:
    """Stacks of one to three matrices of one shape, each of its own spectrum."""
    m, n = draw(shapes())
    dtype = draw(dtypes)
    matrices = []
    for _ in range(draw(st.integers(1, 3))):
        values, seed = draw(spectra(min(m, n))), draw(seeds)
        turned = draw(st.sampled_from(["both", "left", "right", "neither"]))
        left = orthogonal(m, seed) if turned in ("both", "left") else None
        right = orthogonal(n, seed + 1) if turned in ("both", "right") else None
        matrices.append(placed(values, m, n, left, right))
    return drawn(torch.stack(matrices), dtype, draw(units(dtype, subnormal)))


@st.composite
def broad(draw: st.DrawFn) -> Drawn:
    """A matrix with values so close to the largest that few Lanczos steps end between them."""
    n, dtype = draw(st.integers(74, LONGEST)), draw(dtypes)
    values = 1 - draw(st.floats(0.1, 1)) * torch.arange(n, dtype=torch.float64) / n
    A = placed(values, n, n, orthogonal(n, seed := draw(seeds)), orthogonal(n, seed + 1))
    return drawn(A[None], dtype, draw(units(dtype)))
