"""Base classes of the metrics: one number, from sums over batches and processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.plot import _AX_TYPE, _PLOT_OUT_TYPE

from spectral_monitor.functional.norms import ratio


class ScalarMetric(Metric):
    """A metric of one float32 number that is neither good nor bad by itself."""

    is_differentiable = False
    higher_is_better = None
    full_state_update = False

    def plot(self, val: Tensor | Sequence[Tensor] | None = None, ax: _AX_TYPE | None = None) -> _PLOT_OUT_TYPE:
        """Plot one value, or several as a curve.

        Args:
            val: a result of ``forward`` or ``compute``, or a list of such results; without it ``compute`` is called.
            ax: a matplotlib axis to draw on.

        Returns:
            Figure (None if ``ax`` was given) and axis.

        Raises:
            ModuleNotFoundError: matplotlib is not installed (``pip install spectral-monitor[plots]``).
        """
        return self._plot(val, ax)


class AverageMetric(ScalarMetric):
    """A mean over all batches of all processes, in which every value has the same weight."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # Each class names its own states: of metrics with equal initial states, a MetricCollection updates only one.
        self._total, self._count = f"{type(self).__name__}_total", f"{type(self).__name__}_count"
        # Fixed dtypes: processes must agree on them, even one without a batch.
        self.add_state(self._total, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state(self._count, torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    @property
    def total(self) -> Tensor:
        """The sum of the values, float64."""
        total: Tensor = getattr(self, self._total)
        return total

    @property
    def count(self) -> Tensor:
        """The number of values, int64."""
        count: Tensor = getattr(self, self._count)
        return count

    def _add(self, total: Tensor, count: Tensor | int) -> None:
        # Not in place: .to(torch.bfloat16) of a module and set_dtype change the states' dtypes, and this restores them.
        setattr(self, self._total, self.total.double() + total.double())
        setattr(self, self._count, self.count.long() + count)

    def compute(self) -> Tensor:
        """Return the mean, float32; NaN without a value."""
        return ratio(self.total, self.count).float()


class NormAverageMetric(AverageMetric):
    """An average of values that take spectral norms.

    Args:
        tol, exact: as in :func:`spectral_monitor.functional.spectral_norm`.
        kwargs: as in :class:`torchmetrics.Metric`.
    """

    def __init__(self, *, tol: float = 0.01, exact: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.tol, self.exact = tol, exact
        # A state, so that a MetricCollection distinguishes metrics with different estimates.
        self.add_state("tolerance", torch.tensor(0.0 if exact else tol, dtype=torch.float64), dist_reduce_fx="max")
