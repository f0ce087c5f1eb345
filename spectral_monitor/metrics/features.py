"""Alignment, feature change and backward-feature angle over all rows of an epoch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from spectral_monitor.functional.feature_speed import angle_from_sums, angle_sums
from spectral_monitor.functional.features import alignment_sum, change_sum
from spectral_monitor.metrics.base import AverageMetric, NormAverageMetric, ScalarMetric


class Alignment(NormAverageMetric):
    r"""Mean over rows of :math:`\|A x\| / (\|A\|_* \|x\|)`: how close inputs are to A's most stretched one.

    ``update`` takes two arguments:

    - ``A`` (m, n): a weight (alignment) or an update (update alignment), real floating point; it may differ from call
      to call, and each row is measured against the matrix of its own call.
    - ``x`` (rows, n): the layer's inputs.

    ``forward`` and ``compute`` give a float32 scalar in [0, 1]. Rows of zero norm are left out, and so are all rows
    of a call with a zero matrix; NaN if that leaves none, and NaN if any matrix or row had NaN or inf entries.

    Args:
        tol, exact: as in :func:`spectral_monitor.functional.spectral_norm`. By default each call estimates the norm of
            ``A`` from below, and its own rows correct the estimate. The value may therefore depend on how rows are
            split into batches, by up to ``tol``; with ``exact`` it does not.
        kwargs: as in :class:`torchmetrics.Metric`.

    Raises:
        ValueError: by ``update`` if ``A`` is not a matrix or ``x`` not (rows, n) with A's n.

    Source: "A Spectral Condition for Feature Learning", Eq. 24, 25 and Fig. 1.

    Example:
        >>> import torch
        >>> from spectral_monitor.metrics import Alignment
        >>> metric = Alignment()
        >>> weight = torch.diag(torch.tensor([2.0, 1.0]))
        >>> metric.update(weight, torch.tensor([[1.0, 0.0], [3.0, 0.0]]))
        >>> metric.update(weight, torch.tensor([[0.0, 1.0]]))
        >>> metric.compute()
        tensor(0.8333)
    """

    plot_lower_bound = 0.0
    plot_upper_bound = 1.0

    def update(self, A: Tensor, x: Tensor) -> None:
        """Add the rows of ``x`` (rows, n), measured against ``A`` (m, n)."""
        self._add(*alignment_sum(A, x, tol=self.tol, exact=self.exact))


class FeatureChange(AverageMetric):
    r"""Mean over rows of the relative change of features, :math:`\|h_{after} - h_{before}\| / \|h_{before}\|`.

    ``update`` takes two arguments, real floating point and of one shape:

    - ``h_before`` (rows, m): features before the step; with those at the start of training, this is the drift.
    - ``h_after`` (rows, m): features of the same inputs after it.

    ``forward`` and ``compute`` give a float32 scalar >= 0, without units. Rows of zero norm before the step are left
    out; NaN if that leaves none, and NaN if any row had NaN entries.

    Args:
        kwargs: as in :class:`torchmetrics.Metric`.

    Raises:
        ValueError: by ``update`` if the two are not (rows, features) or of different shapes.

    Source: "A Spectral Condition for Feature Learning", Desideratum 1 and Eq. 23.

    Example:
        >>> import torch
        >>> from spectral_monitor.metrics import FeatureChange
        >>> metric = FeatureChange()
        >>> metric.update(torch.ones(3, 8), 1.5 * torch.ones(3, 8))
        >>> metric.update(torch.ones(1, 8), torch.ones(1, 8))
        >>> metric.compute()
        tensor(0.3750)
    """

    plot_lower_bound = 0.0

    def update(self, h_before: Tensor, h_after: Tensor) -> None:
        """Add the rows of ``h_before`` and ``h_after`` (rows, m)."""
        self._add(*change_sum(h_before, h_after))


class BackwardFeatureAngle(ScalarMetric):
    r"""Angle between the change of the features ``dh`` and the steepest descent ``-b``, all rows as one vector.

    It is no mean of angles: the rows of all batches and processes are one vector.

    ``update`` takes two arguments, real floating point and of one shape (any):

    - ``dh``: change of the features by the step.
    - ``b``: gradient of the loss with respect to the features before the step. Over several batches or processes all
      must be gradients of one loss: where each process averages over its own rows, as under DDP, either all have the
      same number of rows or ``b`` is multiplied by that number.

    ``forward`` and ``compute`` give a float32 scalar in radians, in [0, pi/2) for small steps of gradient descent, in
    [0, pi] in general; NaN if all of ``dh`` or all of ``b`` is zero, and NaN if either had NaN or inf entries or
    squares that leave the range of float64. The error is at most 1e-6 rad.

    Args:
        kwargs: as in :class:`torchmetrics.Metric`.

    Raises:
        ValueError: by ``update`` if the two differ in shape or are not real floating point.

    Source: "The Feature Speed Formula", Theorem 2.1.

    Attributes:
        inner_product, dh_squared, b_squared: :math:`\langle b, dh\rangle`, :math:`\|dh\|^2`, :math:`\|b\|^2`;
            float64, because the cosine of a small angle needs many digits.

    Example:
        >>> import torch
        >>> from spectral_monitor.metrics import BackwardFeatureAngle
        >>> metric = BackwardFeatureAngle()
        >>> metric.update(torch.tensor([[-1.0, 1.0]]), torch.tensor([[1.0, 0.0]]))
        >>> metric.compute()
        tensor(0.7854)
        >>> metric.update(torch.tensor([[-1.0, -1.0]]), torch.tensor([[0.0, 1.0]]))
        >>> metric.compute()
        tensor(0.7854)
    """

    plot_lower_bound = 0.0
    plot_upper_bound = math.pi

    inner_product: Tensor
    dh_squared: Tensor
    b_squared: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name in ("inner_product", "dh_squared", "b_squared"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, dh: Tensor, b: Tensor) -> None:
        """Add ``dh`` and ``b``, which have the same shape."""
        inner_product, dh_squared, b_squared = angle_sums(dh, b)
        self.inner_product = self.inner_product + inner_product
        self.dh_squared = self.dh_squared + dh_squared
        self.b_squared = self.b_squared + b_squared

    def compute(self) -> Tensor:
        """Return the angle of all rows in radians, float32."""
        return angle_from_sums(self.inner_product, self.dh_squared, self.b_squared).float()
