"""The Feature Speed Formula: features, the loss, and the angle between their change and steepest descent."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from spectral_monitor.functional.norms import ratio, same_shape
from spectral_monitor.functional.vector_norms import at_once, common_dtype, largest, whole_length
from spectral_monitor.linalg import compute_dtype, to_device

_CHUNK, _COPIED = 1 << 18, 1 << 16
"""Entries that are multiplied at a time: a flat float32 sum over them is exact to 1e-6; fewer if they are copied."""
_SHORT = 1 << 12
"""Tensors with at most so many entries are multiplied together."""


def require_real_pair(**pair: Tensor) -> None:
    """Raise an error unless the two named tensors are real floating point and have one shape."""
    same_shape(**pair)
    (name, a), (other, b) = pair.items()
    if not (a.is_floating_point() and b.is_floating_point()):
        raise ValueError(
            f"{name} ({a.dtype}) and {other} ({b.dtype}) must be real floating-point, shape {tuple(a.shape)}"
        )


def inner(a: Tensor, b: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the inner product, accumulated in float64 over chunks (a flat float32 sum loses digits).

    The products of entries, and the result, are in ``dtype``, by default the common dtype for computing.
    """
    if a.shape != b.shape:
        raise ValueError(f"shapes must agree, got {tuple(a.shape)} and {tuple(b.shape)}")
    dtype = dtype or common_dtype(a, b)
    if a.numel() <= at_once(a, _CHUNK):
        return torch.dot(a.reshape(-1).to(dtype), b.reshape(-1).to(dtype))
    parts = [torch.dot(x.to(dtype), y.to(dtype)) for x, y in _chunks(a, b)]
    return torch.stack(parts).sum(dtype=torch.float64).to(dtype)


def inner_sums(pairs: Sequence[Sequence[tuple[Tensor, Tensor]]], dtype: torch.dtype) -> Tensor:
    """Return for each list of pairs, all on one device, the sum of their inner products (:func:`inner`).

    Short pairs are concatenated and multiplied together, and all sums are formed at once.
    """
    if not any(map(len, pairs)):
        return torch.zeros(len(pairs), dtype=dtype, device="cpu")
    parts: list[Tensor] = []  # products of long pairs, chunk by chunk
    owners: list[int] = []  # index of the list that each part belongs to
    short: list[tuple[int, Tensor, Tensor]] = []
    for k, group in enumerate(pairs):
        for a, b in group:
            if a.numel() <= _SHORT:
                short.append((k, a.reshape(-1), b.reshape(-1)))
                continue
            dots = [torch.dot(x.to(dtype), y.to(dtype)) for x, y in _chunks(a, b)]
            parts, owners = parts + dots, owners + [k] * len(dots)
    values = [torch.stack(parts)] if parts else []
    if short:
        left, right = (torch.cat(side).to(dtype) for side in ([a for _, a, _ in short], [b for _, _, b in short]))
        values.append(left * right)
    lengths = torch.tensor([1] * len(owners) + [len(a) for _, a, _ in short], device="cpu")
    index = torch.repeat_interleave(torch.tensor(owners + [k for k, _, _ in short], device="cpu"), lengths)
    index = to_device(index, values[0].device)
    total = torch.zeros(len(pairs), dtype=torch.float64, device=values[0].device)
    return total.index_add_(0, index, torch.cat(values).double()).to(dtype)


def _chunks(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the entries of two tensors of one shape, flat, in chunks, so that no tensor is copied as a whole."""
    copied, chunk = at_once(a, _COPIED), at_once(a, _CHUNK)
    if a.numel() <= copied or (a.is_contiguous() and b.is_contiguous()):
        yield from zip(a.reshape(-1).split(chunk), b.reshape(-1).split(chunk), strict=True)
        return
    rows = max(1, copied * len(a) // a.numel())
    for x, y in zip(a.split(rows), b.split(rows), strict=True):
        yield from _chunks(*((x, y) if len(x) > 1 else (x.squeeze(0), y.squeeze(0))))


def _scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x`` in its dtype for computing, over its largest entry so that squares are safe, and that entry."""
    x = x.to(compute_dtype(x.dtype))
    size = largest(x)
    return x / size, size


@torch.no_grad()
def backward_feature_cosine(dh: Tensor, b: Tensor) -> Tensor:
    r"""Cosine of the backward-feature angle, :math:`-\langle b, dh\rangle / (\|b\| \|dh\|)`.

    Args:
        dh: change of the features by the step, any shape.
        b: gradient of the loss with respect to the features before the step, the same shape.

    Returns:
        A scalar in [-1, 1], in (0, 1] for small steps of gradient descent; NaN if either is zero.

    Raises:
        ValueError: shapes differ, or not real floating point.

    Source: "The Feature Speed Formula", Theorem 2.1 (whose text leaves out the division by both norms).

    Example:
        >>> import torch
        >>> backward_feature_cosine(torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 0.0]))
        tensor(1.)
    """
    require_real_pair(dh=dh, b=b)
    (u, _), (v, _) = _scaled(dh), _scaled(b)
    return ratio(-inner(v, u).double(), whole_length(v) * whole_length(u)).clamp(-1, 1).to(common_dtype(dh, b))


@torch.no_grad()
def backward_feature_angle(dh: Tensor, b: Tensor) -> Tensor:
    r"""Backward-feature angle (BFA): between the change of the features ``dh`` and the steepest descent ``-b``.

    Args:
        dh: change of the features by the step, any shape; all entries count as one vector.
        b: gradient of the loss with respect to the features before the step, the same shape.

    Returns:
        A scalar in radians, in [0, pi/2) for small steps of gradient descent, in [0, pi] at large; NaN if either
        is zero. Small angles are as accurate as large ones.

    Raises:
        ValueError: shapes differ, or not real floating point.

    Source: "The Feature Speed Formula", Theorem 2.1.

    Example:
        >>> import torch
        >>> backward_feature_angle(torch.tensor([-1.0, 1.0]), torch.tensor([1.0, 0.0]))
        tensor(0.7854)
    """
    require_real_pair(dh=dh, b=b)
    dtype = common_dtype(dh, b)
    (u, _), (v, _) = _scaled(dh.to(dtype)), _scaled(b.to(dtype))
    sizes = torch.stack([whole_length(u), whole_length(v)])
    u, v = u.div_(sizes[0]), v.div_(-sizes[1])
    # Kahan: arccos of a rounded cosine near 1 loses half the digits.
    angle = 2 * torch.atan2(whole_length(u - v), whole_length(u + v))
    # Zero and infinite vectors have no direction.
    return torch.where(((sizes > 0) & sizes.isfinite()).all(), angle, math.nan).to(dtype)


@torch.no_grad()
def angle_sums(dh: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r""":math:`\langle b, dh\rangle`, :math:`\|dh\|^2` and :math:`\|b\|^2` in float64.

    Unlike angles they add up over batches and processes; :func:`angle_from_sums` gives the angle of the whole.
    """
    require_real_pair(dh=dh, b=b)
    return inner(b, dh, torch.float64), inner(dh, dh, torch.float64), inner(b, b, torch.float64)


@torch.no_grad()
def angle_from_sums(inner_product: Tensor, dh_squared: Tensor, b_squared: Tensor) -> Tensor:
    """Return the backward-feature angle, float64, from :func:`angle_sums` added up.

    NaN if ``dh`` or ``b`` is zero, or their squares leave the range of float64. A rounded cosine leaves angles below
    1e-6 rad undetermined, where :func:`backward_feature_angle` on all rows at once would not.
    """
    squares, limits = torch.stack([dh_squared, b_squared]).double(), torch.finfo(torch.float64)
    in_range = ((squares > limits.tiny / limits.eps) & squares.isfinite()).all()
    cosine = ratio(-inner_product, dh_squared.sqrt() * b_squared.sqrt()).clamp(-1, 1)
    return torch.where(in_range, torch.acos(cosine), math.nan)


@torch.no_grad()
def sensitivity(dh: Tensor, b: Tensor) -> Tensor:
    r"""Feature change per loss decrease, :math:`\mathrm{rms}(dh) / (-\langle b, dh\rangle)`.

    The denominator is the first-order loss decrease due to the parameters up to these features.

    Args:
        dh: change of the features by the step, any shape.
        b: gradient of the loss with respect to the features before the step, the same shape.

    Returns:
        A scalar per unit of loss; negative if the features moved uphill; NaN if neither uphill nor downhill.

    Raises:
        ValueError: shapes differ, or not real floating point.

    Source: "The Feature Speed Formula", Eq. 4; its inverse is the laziness.

    Example:
        >>> import torch
        >>> sensitivity(torch.tensor([-0.1, -0.1]), torch.tensor([1.0, 0.0]))
        tensor(1.0000)
    """
    require_real_pair(dh=dh, b=b)
    (u, _), (v, size) = _scaled(dh), _scaled(b)
    per_unit = ratio(whole_length(u) / math.sqrt(max(dh.numel(), 1)), -inner(v, u).double())
    return (per_unit / size.double()).to(common_dtype(dh, b))  # the size of dh cancels


@torch.no_grad()
def contribution(g: Tensor, dW: Tensor) -> Tensor:
    r"""First-order loss decrease by one parameter's update, :math:`-\langle g, \Delta W\rangle`.

    Args:
        g: gradient of the loss with respect to the parameter, any shape.
        dW: its update, the same shape.

    Returns:
        A scalar in units of the loss, positive where the update goes downhill; for gradient descent
        :math:`\eta \|g\|_F^2`. Minus the sum over all parameters predicts the change of the loss.

    Raises:
        ValueError: shapes differ, or not real floating point.

    Source: "The Feature Speed Formula", Theorem 2.1 and property (BC), in the form that holds for any optimizer.

    Example:
        >>> import torch
        >>> g = torch.tensor([[3.0, 4.0]])
        >>> contribution(g, -0.1 * g)
        tensor(2.5000)
    """
    require_real_pair(g=g, dW=dW)
    return -inner(g, dW)


@torch.no_grad()
def backward_speed(b_before: Tensor, b_after: Tensor) -> Tensor:
    r"""Relative change :math:`\|b_{after} - b_{before}\| / \|b_{before}\|` of the gradient of the loss with respect to
    a layer's features.

    Args:
        b_before: before the step, any shape; all entries count as one vector.
        b_after: after it, the same shape.

    Returns:
        A scalar >= 0; NaN if the gradient was zero.

    Raises:
        ValueError: shapes differ, or not real floating point.

    Source: "The Feature Speed Formula", Section 6, (BS); its Proposition 6.1 predicts it for homogeneous networks.

    Example:
        >>> import torch
        >>> backward_speed(torch.ones(4), 1.5 * torch.ones(4))
        tensor(0.5000)
    """
    require_real_pair(b_before=b_before, b_after=b_after)
    dtype = common_dtype(b_before, b_after)
    return ratio(whole_length(b_after.to(dtype) - b_before.to(dtype)), whole_length(b_before)).to(dtype)
