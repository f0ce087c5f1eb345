"""Norms of weights and updates, averaged over matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from spectral_monitor.functional import spectral_norm, stable_rank
from spectral_monitor.metrics.base import NormAverageMetric


class SpectralNorm(NormAverageMetric):
    r"""Mean over matrices of the spectral norm :math:`\|A\|_*`.

    ``update`` takes one argument:

    - ``A`` (..., m, n): one matrix or any stack of them, real floating point; each counts as one. Shapes may differ
      from call to call.

    ``forward`` and ``compute`` give a float32 scalar >= 0, in the units of the entries: 0 counts for a zero matrix,
    NaN if any matrix had NaN or inf entries, NaN if there was no matrix.

    Args:
        tol, exact: as in :func:`spectral_monitor.functional.spectral_norm`.
        kwargs: as in :class:`torchmetrics.Metric`.

    Raises:
        ValueError: by ``update`` if ``A`` is not (..., m, n) real floating point or ``tol`` is not in (0, 1).

    Source: "A Spectral Condition for Feature Learning", Condition 1; Golub and Kahan (1965).

    Example:
        >>> import torch
        >>> from spectral_monitor.metrics import SpectralNorm
        >>> metric = SpectralNorm()
        >>> metric.update(torch.diag(torch.tensor([3.0, 4.0])))
        >>> metric.update(torch.stack([torch.eye(2), torch.eye(2)]))
        >>> metric.compute()
        tensor(2.)
    """

    plot_lower_bound = 0.0

    def update(self, A: Tensor) -> None:
        """Add the matrices of ``A`` (..., m, n)."""
        norms = spectral_norm(A, tol=self.tol, exact=self.exact)
        self._add(norms.sum(dtype=torch.float64), norms.numel())


class StableRank(NormAverageMetric):
    r"""Mean over matrices of the stable rank :math:`\|A\|_F^2 / \|A\|_*^2`.

    ``update`` takes one argument:

    - ``A`` (..., m, n): one matrix or any stack of them, real floating point; each counts as one. Shapes may differ
      from call to call.

    ``forward`` and ``compute`` give a float32 scalar >= 1, a number of directions. A zero matrix has no stable rank
    and is left out of the mean (a readout that starts at zero must not hide the other layers); NaN if that leaves
    none, and NaN if any matrix had NaN or inf entries.

    Args:
        tol, exact: as in :func:`spectral_monitor.functional.stable_rank`.
        kwargs: as in :class:`torchmetrics.Metric`.

    Raises:
        ValueError: by ``update`` if ``A`` is not (..., m, n) real floating point or ``tol`` is not in (0, 1).

    Source: "A Spectral Condition for Feature Learning", Fig. 1 and Table 1.

    Example:
        >>> import torch
        >>> from spectral_monitor.metrics import StableRank
        >>> metric = StableRank()
        >>> metric(torch.eye(5))
        tensor(5.)
        >>> metric(torch.stack([torch.ones(3, 3), torch.zeros(3, 3)]))
        tensor(1.)
        >>> metric.compute()
        tensor(3.)
    """

    plot_lower_bound = 1.0

    def update(self, A: Tensor) -> None:
        """Add the matrices of ``A`` (..., m, n)."""
        ranks = stable_rank(A, tol=self.tol, exact=self.exact)
        counted = torch.count_nonzero(A, dim=(-2, -1)) > 0  # NaN is not zero
        self._add(torch.where(counted, ranks, 0.0).sum(dtype=torch.float64), counted.sum())
