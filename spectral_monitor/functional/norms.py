"""Norms of weights and updates."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from spectral_monitor.fitting.medians import geometric_median
from spectral_monitor.functional.vector_norms import lengths
from spectral_monitor.linalg import ShardedStack, SpectralEstimate, compute_dtype, run_local, spectral_estimate, tame

ROLES = ("operator", "embedding", "readout", "vector")
"""Roles of parameters, which determine their natural norm."""


def as_stack(A: Tensor, name: str = "A") -> Tensor:
    """Return ``A`` (..., m, n) as (K, m, n); raise an error unless it is a stack of real matrices."""
    if A.ndim < 2 or not A.is_floating_point():
        raise ValueError(f"{name} must be real floating-point of shape (..., m, n), got {A.dtype} {tuple(A.shape)}")
    return A.reshape(math.prod(A.shape[:-2]), *A.shape[-2:])  # -1 is ambiguous for an empty matrix


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return ``numerator / denominator``, NaN where the denominator is 0."""
    return torch.where(denominator == 0, math.nan, numerator / denominator)


def same_shape(**pair: Tensor) -> None:
    """Raise an error unless the two named tensors have one shape."""
    (name, a), (other, b) = pair.items()
    if a.shape != b.shape:
        raise ValueError(f"{name} {tuple(a.shape)} and {other} {tuple(b.shape)} must have one shape")


def _difference(W: Tensor, W0: Tensor) -> Tensor:
    """Return ``W - W0`` in the dtype for computing: half precisions would round it away."""
    same_shape(W=W, W0=W0)
    return as_stack(W, "W").to(compute_dtype(W.dtype)).reshape(W.shape) - W0.to(compute_dtype(W0.dtype))


def _estimate(A: Tensor, tol: float, exact: bool) -> SpectralEstimate:
    return spectral_estimate(as_stack(A), tol=tol, exact=exact)


@torch.no_grad()
def spectral_norm(A: Tensor, *, tol: float = 0.01, exact: bool = False) -> Tensor:
    r"""Largest singular value :math:`\|A\|_*` of each matrix.

    Estimated by Lanczos bidiagonalization (:mod:`spectral_monitor.linalg`): a lower bound, within ``tol`` of the
    truth. The same input gives the same output; the global random state is not touched.

    Args:
        A: (..., m, n) real floating point. Half precisions are measured in float32.
        tol: relative tolerance at which the iteration stops.
        exact: use a float64 SVD instead.

    Returns:
        (...) norms, float32 or float64; 0 for a zero matrix, NaN if A has NaN or inf.

    Raises:
        ValueError: ``A`` is not a real floating-point matrix or stack of matrices, or ``tol`` is not in (0, 1).

    Source: "A Spectral Condition for Feature Learning", Condition 1; Golub and Kahan (1965).

    Example:
        >>> import torch
        >>> spectral_norm(torch.diag(torch.tensor([3.0, 4.0])))
        tensor(4.)
    """
    return _estimate(A, tol, exact).sigma.reshape(A.shape[:-2])


@torch.no_grad()
def spectral_norm_bounds(A: Tensor, *, tol: float = 0.01) -> tuple[Tensor, Tensor]:
    r"""Certain bounds ``(low, high)`` on the spectral norm.

    ``low`` is the Lanczos estimate less its rounding error. ``high`` is the least of
    :math:`\sqrt{\sigma^2 + r^2}` (``r`` the Frobenius norm of the part outside the Krylov space, never more than
    :math:`\|A\|_F`) and :math:`\sqrt{\|A\|_1 \|A\|_\infty}`. For low-rank matrices, such as updates, both ends agree
    to a few percent; for Gaussian ones ``high`` is loose.

    Args:
        A: (..., m, n) real floating point.
        tol: relative tolerance of the estimate behind ``low``.

    Returns:
        Two tensors of shape (...).

    Raises:
        ValueError: as :func:`spectral_norm`.

    Example:
        >>> import torch
        >>> low, high = spectral_norm_bounds(torch.outer(torch.ones(100), torch.ones(400)))
        >>> bool(low <= 200 <= high), bool(high / low < 1.01)
        (True, True)
    """
    estimate = _estimate(A, tol, exact=False)
    high, sizes = estimate.sigma_high, as_stack(A).to(compute_dtype(A.dtype)).abs()
    if sizes.numel():
        rounding = 1 + 8 * torch.finfo(sizes.dtype).eps * math.sqrt(max(A.shape[-2:]))
        columns, rows = (sizes.sum(dim).amax(1).sqrt() for dim in (1, 2))
        high = torch.minimum(high, columns * rows * rounding)
    return estimate.sigma_low.reshape(A.shape[:-2]), high.reshape(A.shape[:-2])


@torch.no_grad()
def frobenius_norm(A: Tensor) -> Tensor:
    r"""Frobenius norm :math:`\|A\|_F`, the root of the sum of squared entries.

    Args:
        A: (..., m, n) real floating point. Half precisions are summed in float32.

    Returns:
        (...) norms.

    Raises:
        ValueError: ``A`` is not a real floating-point matrix or stack of matrices.

    Example:
        >>> import torch
        >>> frobenius_norm(torch.ones(2, 8))
        tensor(4.0000)
    """
    _, fro, scale, _ = run_local(tame([ShardedStack.whole(as_stack(A).to(compute_dtype(A.dtype)))]))
    return (fro * scale).reshape(A.shape[:-2])


@torch.no_grad()
def stable_rank(A: Tensor, *, tol: float = 0.01, exact: bool = False) -> Tensor:
    r"""Stable rank :math:`\|A\|_F^2 / \|A\|_*^2`: the number of singular values about as large as the largest.

    Args:
        A: (..., m, n) real floating point.
        tol, exact: as in :func:`spectral_norm`.

    Returns:
        (...) values in [1, min(m, n)]; NaN for a zero matrix.

    Raises:
        ValueError: as :func:`spectral_norm`.

    Source: "A Spectral Condition for Feature Learning", Fig. 1 and Table 1.

    Example:
        >>> import torch
        >>> stable_rank(torch.eye(5))
        tensor(5.)
    """
    estimate = _estimate(A, tol, exact)
    return ratio(estimate.fro, estimate.sigma).square().reshape(A.shape[:-2])


@torch.no_grad()
def natural_norm(A: Tensor, role: str = "operator", *, tol: float = 0.01, exact: bool = False) -> Tensor:
    r"""Return the norm in which "order 1" is the spectral condition at every width.

    * ``"operator"``, ``"readout"``: :math:`\sqrt{n/m}\,\|A\|_*` for A (..., m, n), m = fan_out, n = fan_in: the
      largest RMS of an output over inputs of RMS 1.
    * ``"embedding"``: A (..., tokens, d); the largest RMS over rows, the same induced norm on one-hot inputs
      (fan_in counts as 1).
    * ``"vector"``: A (..., d); the RMS of its entries.

    Args:
        A: as above, real floating point.
        role: one of the four.
        tol, exact: as in :func:`spectral_norm`; for operators and readouts only.

    Returns:
        (...) norms: the leading dimensions.

    Raises:
        ValueError: unknown role, or a shape the role does not fit.

    Source: "A Spectral Condition for Feature Learning", Condition 1 and Appendix E. (Its Eq. 30 prints the ratio
    upside down; Condition 2 follows only with :math:`\sqrt{n/m}`.)

    Example:
        >>> import torch
        >>> natural_norm(2 * torch.eye(8))
        tensor(2.)
        >>> natural_norm(torch.tensor([[3.0, 4.0], [0.0, 1.0]]), "embedding") ** 2
        tensor(12.5000)
    """
    if role not in ROLES:
        raise ValueError(f"unknown role {role!r}; valid roles: {', '.join(ROLES)}")
    if role == "vector":
        if A.ndim < 1 or not A.is_floating_point():
            raise ValueError(f"a vector must be real floating-point (..., d), got {A.dtype} {tuple(A.shape)}")
        return _row_rms(A)
    stack = as_stack(A)
    if role == "embedding":
        largest = _row_rms(stack)
        return (largest.amax(1) if largest.shape[1] else largest.sum(1)).reshape(A.shape[:-2])
    m, n = A.shape[-2:]
    return spectral_norm(A, tol=tol, exact=exact) * math.sqrt(n / m if m else 0.0)


def _row_rms(rows: Tensor) -> Tensor:
    """Return the RMS over the last dimension, float32 for half precisions."""
    return (lengths(rows) / math.sqrt(max(rows.shape[-1], 1))).to(compute_dtype(rows.dtype))


@torch.no_grad()
def update_ratio(dW: Tensor, W: Tensor, *, tol: float = 0.01, exact: bool = False) -> Tensor:
    r"""Size of an update relative to its weight, :math:`\|\Delta W\|_* / \|W\|_*`.

    Args:
        dW: (..., m, n) the update.
        W: (..., m, n) the weight before it.
        tol, exact: as in :func:`spectral_norm`.

    Returns:
        (...) ratios; NaN where W is zero.

    Raises:
        ValueError: shapes differ, or as :func:`spectral_norm`.

    Source: "A Spectral Condition for Feature Learning", Condition 1.

    Example:
        >>> import torch
        >>> update_ratio(0.5 * torch.eye(3), torch.eye(3))
        tensor(0.5000)
    """
    same_shape(dW=dW, W=W)
    return ratio(spectral_norm(dW, tol=tol, exact=exact), spectral_norm(W, tol=tol, exact=exact))


@torch.no_grad()
def drift_ratio(W: Tensor, W0: Tensor, *, tol: float = 0.01, exact: bool = False) -> Tensor:
    r"""Return the relative movement of a weight since the start, :math:`\|W - W_0\|_* / \|W_0\|_*`.

    Args:
        W: (..., m, n) the weight now.
        W0: (..., m, n) the weight at the start of training.
        tol, exact: as in :func:`spectral_norm`.

    Returns:
        (...) ratios; NaN where W0 is zero.

    Raises:
        ValueError: shapes differ, or as :func:`spectral_norm`.

    Source: "A Spectral Condition for Feature Learning", Fig. 2B.

    Example:
        >>> import torch
        >>> drift_ratio(3 * torch.eye(4), torch.eye(4))
        tensor(2.)
    """
    drift = _difference(W, W0)
    return ratio(spectral_norm(drift, tol=tol, exact=exact), spectral_norm(W0, tol=tol, exact=exact))


@torch.no_grad()
def drift_fro_ratio(W: Tensor, W0: Tensor) -> Tensor:
    r"""Return the drift in the Frobenius norm, :math:`\|W - W_0\|_F / \|W_0\|_F`.

    Args:
        W, W0: (..., m, n).

    Returns:
        (...) ratios; NaN where W0 is zero.

    Raises:
        ValueError: shapes differ, or as :func:`frobenius_norm`.

    Source: "A Spectral Condition for Feature Learning", Fig. 2D.

    Example:
        >>> import torch
        >>> drift_fro_ratio(3 * torch.eye(4), torch.eye(4))
        tensor(2.)
    """
    return ratio(frobenius_norm(_difference(W, W0)), frobenius_norm(W0))


def balance_ratios(natural: Tensor) -> Tensor:
    """Return natural norms over their geometric median; NaN where there is nothing to compare with.

    Example:
        >>> import torch
        >>> balance_ratios(torch.tensor([0.1, 0.2, 0.8]))
        tensor([0.5000, 1.0000, 4.0000])
    """
    return torch.where(natural > 0, natural / geometric_median(natural.tolist()), math.nan)
