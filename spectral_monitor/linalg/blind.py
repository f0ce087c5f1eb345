"""Largest singular values without a look: the host asks the device for nothing, and so never waits for it.

Lanczos makes a number of steps that is given, and what says whether they were enough comes back with the numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from spectral_monitor.linalg.lanczos import BLOCK, TINY, KrylovSpace
from spectral_monitor.linalg.pieces import Pieces
from spectral_monitor.linalg.rounds import alone

SQUARINGS = 12
"""The leading Ritz value is read off the 4096th power of the small matrix: at most 1/4096 low."""


class BlindEstimate(NamedTuple):
    """What Lanczos has found of a stack of K matrices, all of it still on the device.

    Attributes:
        sigma: (K,) largest singular values, never above the truth but for rounding; NaN where entries are NaN or inf.
        fro: (K,) Frobenius norms.
        doubt: (K,) how probable it is, at most, that a singular value above ``(1 + tol) sigma`` was not seen.
        early: (K,) the same one step before the last; 1 if there was none.
    """

    sigma: Tensor
    fro: Tensor
    doubt: Tensor
    early: Tensor


@torch.no_grad()
def blind_estimate(A: Pieces, steps: int, tol: float) -> BlindEstimate:
    """Largest singular values of a stack of matrices that are all here after ``steps`` steps of block Lanczos.

    Float64 norms and vectors scaled by them leave no entries too small or too large to be squared.

    Example:
        >>> A = Pieces.whole(torch.diag(torch.arange(200.0)).unsqueeze(0))
        >>> found = blind_estimate(A, steps=30, tol=0.01)
        >>> abs(found.sigma.item() / 199 - 1) < 0.01, found.doubt.item() < 0.01
        (True, True)
    """
    fro = alone(A.combined(_frobenius, 2))
    if 1 in A.shape[1:]:
        return BlindEstimate(fro, fro, torch.zeros_like(fro), torch.zeros_like(fro))
    tall = A if A.shape[1] >= A.shape[2] else A.mT
    steps = min(steps, -(-tall.shape[2] // BLOCK) + 1)  # more than the whole space there is not
    space = _Space(tall, steps, fro)
    everyone, nothing = torch.arange(A.shape[0]), A.like.new_zeros(0)
    early = torch.ones_like(fro)
    for step in range(1, steps + 1):
        alone(space.step(everyone, nothing))
        if step == steps - 1:
            early, _ = space.look(tol)
    doubt, sigma = space.look(tol)
    return BlindEstimate(sigma * fro, fro, doubt, early)


def _frobenius(A: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(torch.linalg.vector_norm(A, dim=2, dtype=torch.float64), dim=1)
    return norms


class _Space(KrylovSpace):
    """Asks the device for nothing."""

    def look(self, tol: float) -> tuple[Tensor, Tensor]:
        """The doubt that is left, and sigma in units."""
        end = self.steps * self.block
        return self.doubt(self.T[:, : end + self.block, :end].double(), tol), self.square.sqrt()

    def leading(self, T: Tensor) -> Tensor:
        return leading(T[:, : T.shape[2]]).clamp(min=TINY)


def leading(S: Tensor) -> Tensor:
    """The leading eigenvalues of positive semidefinite (K, k, k), from below, by squaring."""
    power = S
    for _ in range(SQUARINGS):
        power = power / torch.linalg.vector_norm(power, dim=(1, 2), keepdim=True).clamp(min=TINY)
        power = torch.bmm(power, power)
    weighted = (power * S.mT).sum((1, 2))
    found: Tensor = weighted / power.diagonal(dim1=1, dim2=2).sum(1).clamp(min=TINY)
    return found
