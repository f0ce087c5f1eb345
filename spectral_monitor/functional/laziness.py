"""Feature learning or lazy training: measures of the distance to the linearization at the start."""

from __future__ import annotations

import torch
from torch import Tensor

from spectral_monitor.functional.features import as_rows
from spectral_monitor.functional.norms import ratio, same_shape
from spectral_monitor.functional.vector_norms import common_dtype, largest, whole_length


@torch.no_grad()
def linearity(h_start: Tensor, h_now: Tensor, h_tangent: Tensor) -> Tensor:
    r"""Return the relative distance of outputs from those of the network's linearization at the start.

    That is :math:`\|h_t - h_0 - J_0 (w_t - w_0)\| / \|h_t - h_0\|`.

    Args:
        h_start: outputs at the start, any shape; all entries count as one vector.
        h_now: outputs for the same inputs now.
        h_tangent: ``J_0 (w_t - w_0)``, the derivative of the outputs at the start along the movement of the weights.

    Returns:
        A scalar >= 0: 0 in the kernel regime, of order 1 where features are learned; NaN if nothing has changed.

    Raises:
        ValueError: shapes differ.

    Source: "Feature Learning in Infinite-Width Neural Networks", Def. 3.7, Eq. 9.

    Example:
        >>> import torch
        >>> linearity(torch.zeros(1), torch.tensor([1.1 ** 2 - 1]), torch.tensor([0.2])).round(decimals=4)
        tensor(0.0476)
    """
    if not h_start.shape == h_now.shape == h_tangent.shape:
        raise ValueError(
            f"h_start {tuple(h_start.shape)}, h_now {tuple(h_now.shape)} and h_tangent {tuple(h_tangent.shape)} "
            "must have one shape"
        )
    dtype = common_dtype(h_start, h_now)
    change = h_now.to(dtype) - h_start.to(dtype)
    return ratio(whole_length(change - h_tangent.to(dtype)), whole_length(change)).to(dtype)


@torch.no_grad()
def output_parts(
    W_start: Tensor, W_now: Tensor, x_start: Tensor, x_now: Tensor, change: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Return the sizes of the parts of a readout's change since the start, relative to the change of its outputs.

    The outputs of a matrix change by ``W_0 dx + dW x_0 + dW dx``: by the change of its inputs, of the matrix itself,
    and of both together.

    Args:
        W_start, W_now: (m, n) the matrix at the start and now.
        x_start, x_now: (rows, n) its inputs then and now, of the same samples.
        change: (rows, m) of its outputs, with that of a bias.

    Returns:
        Three scalars >= 0: ``|W_0 dx|``, ``|dW x_0|`` and ``|dW dx|``, over ``|change|``. They are sizes of vectors
        that may cancel: they need not add up to 1. NaN if nothing has changed.

    Raises:
        ValueError: shapes that do not fit.

    Source: "Feature Learning in Infinite-Width Neural Networks", Def. 5.4, Prop. 5.5 and Appendix B.

    Example:
        >>> import torch
        >>> one = torch.ones(1, 1)
        >>> output_parts(one, 2 * one, one, 4 * one, 7 * one)
        (tensor(0.4286), tensor(0.1429), tensor(0.4286))
    """
    x, dx = as_rows(x_start, "x_start"), as_rows(x_now, "x_now")
    if W_start.shape != W_now.shape or x.shape != dx.shape or change.shape != (len(x), len(W_start)):
        raise ValueError(
            f"W_start {tuple(W_start.shape)}, W_now {tuple(W_now.shape)}, x_start {tuple(x.shape)}, x_now "
            f"{tuple(dx.shape)} and change {tuple(change.shape)} do not fit"
        )
    dtype = common_dtype(W_start, x, change)
    W, x, dW = W_start.to(dtype), x.to(dtype), W_now.to(dtype) - W_start.to(dtype)
    dx = dx.to(dtype) - x
    with torch.autocast(x.device.type, enabled=False):
        parts = (dx @ W.T, x @ dW.T, dx @ dW.T)
    first, second, both = (ratio(whole_length(part), whole_length(change)).to(dtype) for part in parts)
    return first, second, both


@torch.no_grad()
def kernel_change(h_before: Tensor, h_after: Tensor) -> Tensor:
    r"""Relative change :math:`\|F_{after} - F_{before}\|_F / \|F_{before}\|_F` of the feature kernel
    ``F = H H^T / m``, the inner products of all pairs of rows.

    Args:
        h_before: (rows, m) features before the step.
        h_after: (rows, m) features of the same inputs after it.

    Returns:
        A scalar >= 0; 0 also where the features only rotate; NaN if all features are zero.

    Raises:
        ValueError: not (rows, features), or shapes differ.

    Source: "Feature Learning in Infinite-Width Neural Networks": features are learnt where this kernel evolves.

    Example:
        >>> import torch
        >>> kernel_change(torch.eye(3), 2 * torch.eye(3))
        tensor(3.)
    """
    before, after = as_rows(h_before, "h_before"), as_rows(h_after, "h_after")
    same_shape(h_before=before, h_after=after)
    dtype = common_dtype(before, after)
    size = largest(before)
    before, change = before.to(dtype) / size, (after.to(dtype) - before.to(dtype)) / size
    with torch.autocast(before.device.type, enabled=False):
        mixed = change @ before.T  # F after less F before cancels; its parts do not
        return ratio(whole_length(mixed + mixed.T + change @ change.T), whole_length(before @ before.T)).to(dtype)


@torch.no_grad()
def kernel_alignment(h_start: Tensor, h_now: Tensor) -> Tensor:
    r"""Return the cosine of two centered feature kernels, ``<C F_0 C, C F_t C> / (|C F_0 C|_F |C F_t C|_F)``.

    ``F = H H^T / m`` holds the inner products of all pairs of rows, ``C = 1 - 1 1^T / rows`` subtracts means.

    Args:
        h_start: (rows, m) features at the start.
        h_now: (rows, m') features of the same inputs now.

    Returns:
        A scalar in [0, 1]: 1 if the kernel has only been scaled; NaN if all rows are equal.

    Raises:
        ValueError: not (rows, features), or numbers of rows differ.

    Source: Cortes, Mohri and Rostamizadeh (arXiv 1203.0550); as "linear CKA" Kornblith et al. (arXiv 1905.00414).

    Example:
        >>> import torch
        >>> kernel_alignment(torch.eye(3), 2 * torch.eye(3))
        tensor(1.)
    """
    start, now = as_rows(h_start, "h_start"), as_rows(h_now, "h_now")
    if len(start) != len(now):
        raise ValueError(f"h_start has {len(start)} rows, h_now {len(now)}")
    dtype = common_dtype(start, now)
    with torch.autocast(start.device.type, enabled=False):
        kernels = []
        for rows in (start, now):
            centered = rows.to(dtype) / largest(rows)
            centered = centered - centered[:1]  # equal rows become exact zeros
            centered = centered - centered.mean(0)
            kernels.append(centered @ centered.T)
        first, second = kernels
        product = (first * second).sum(dtype=torch.float64)
        cosine = ratio(product, whole_length(first).double() * whole_length(second).double())
        return cosine.clamp(0, 1).to(dtype)  # rounding alone leaves the range
