"""Kernels, and what the papers assume: moments of the backward-to-feature kernel, speeds, cancellation, shares."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spectral_monitor.functional.feature_speed import require_alike
from spectral_monitor.functional.features import as_rows, mean_ratio
from spectral_monitor.functional.norms import ratio, spectral_norm
from spectral_monitor.functional.vector_norms import common_dtype, largest, lengths, whole_length
from spectral_monitor.linalg import compute_dtype

SAME = 0.01
"""Relative difference up to which two ways to the same number agree."""


def length(x: Tensor) -> Tensor:
    """Root of the sum of squares, in the dtype ``x`` is measured in.

    Of all that a step's passes show, and so as fast as can be: squares of float32 entries below 1e-19 or above 1e19
    are lost. :func:`spectral_monitor.functional.vector_norms.whole_length` loses none, and takes several times as long.
    """
    x = x.to(compute_dtype(x.dtype))
    norm: Tensor = torch.linalg.vector_norm(torch.linalg.vector_norm(x, dim=-1) if x.ndim else x)
    return norm


def signs(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Random signs, float32 on the CPU: a Hutchinson probe, whose outer product with itself is the identity on average.

    Example:
        >>> signs((2, 3), torch.Generator().manual_seed(0)).abs()
        tensor([[1., 1., 1.],
                [1., 1., 1.]])
    """
    drawn: Tensor = torch.randint(0, 2, tuple(shape), generator=generator) * 2.0 - 1.0
    return drawn


def bfk_moments(
    outputs: Sequence[Tensor], parameters: Sequence[Tensor], rates: Sequence[float], probes: Sequence[Sequence[Tensor]]
) -> tuple[Tensor, Tensor]:
    """Moments ``M_p = tr K^p / m``, p = 1, 2, of the backward-to-feature kernel.

    The kernel ``K`` is the sum of ``lr J J^T`` over the parameters, ``J`` the derivative of the features by each:
    ``-K b`` is the velocity of the features under gradient descent. It is never formed. For a probe z, ``J^T z`` is one
    backward pass, and ``K z`` another one through that; M_1 is the mean of ``<z, K z> / m``, M_2 of ``|K z|^2 / m``.

    Args:
        outputs: the features, m entries in all, with the graph that leads to them, which is kept.
        parameters: weights; those that do not lead to the outputs add nothing.
        rates: the learning rate of each.
        probes: each a tensor for every output, of its shape. With random signs (:func:`signs`) the moments are
            estimates; with the columns of sqrt(m) times the identity they are exact.

    Returns:
        Two scalars.

    Raises:
        ValueError: no probes, not as many rates as parameters, a probe not like the outputs, outputs without a graph.
        RuntimeError: an operation in the graph that torch cannot differentiate twice.

    Source: "The Feature Speed Formula", Section 3.

    Example:
        >>> import torch
        >>> W, x = torch.ones(2, 3, requires_grad=True), torch.tensor([1.0, 2.0, 2.0])
        >>> m1, m2 = bfk_moments([W @ x], [W], [0.1], [[torch.tensor([1.0, -1.0])]])  # K is 0.1 |x|^2 times 1
        >>> m1, m2
        (tensor(0.9000), tensor(0.8100))
    """
    if not probes or len(parameters) != len(rates):
        raise ValueError(
            f"{len(probes)} probes, {len(rates)} rates for {len(parameters)} parameters: need >= 1, and all"
        )
    shapes = [tuple(out.shape) for out in outputs]
    for probe in probes:
        if [tuple(z.shape) for z in probe] != shapes:
            raise ValueError(f"probes must be like the outputs {shapes}, got {[tuple(z.shape) for z in probe]}")
    if not all(out.requires_grad for out in outputs):
        raise ValueError(f"outputs {shapes} must have a graph that leads to them")
    first, second, gaps = [], [], []
    one, *_ = outputs
    nothing = one.new_zeros((), dtype=compute_dtype(one.dtype))
    with torch.enable_grad(), torch.autocast(one.device.type, enabled=False):
        for probe in probes:
            z = [part.to(out).requires_grad_() for part, out in zip(probe, outputs, strict=True)]
            found = torch.autograd.grad(outputs, parameters, z, retain_graph=True, create_graph=True, allow_unused=True)
            pairs = [(g, rate) for g, rate in zip(found, rates, strict=True) if g is not None and rate]
            scaled = [(g.detach() * rate).to(g) for g, rate in pairs]
            moved = torch.autograd.grad([g for g, _ in pairs], z, scaled, allow_unused=True) if pairs else ()
            pushed = [(part.detach(), Kz) for part, Kz in zip(z, moved, strict=bool(pairs)) if Kz is not None]
            first.append(sum((_inner(g.detach(), u) for (g, _), u in zip(pairs, scaled, strict=True)), nothing))
            second.append(sum((_inner(Kz, Kz) for _, Kz in pushed), nothing))
            gaps.append(sum((_inner(*pair) for pair in pushed), nothing) - first[-1])
    trace, gap = torch.stack(first), torch.stack(gaps).abs().sum()
    # <z, K z> in two ways. Some operations, instead of failing, drop out of the second pass without a word.
    if gap > max(SAME, 10 * max(torch.finfo(out.dtype).eps for out in outputs)) * trace.sum():
        raise RuntimeError("an operation on the way cannot be differentiated twice")
    size = sum(out.numel() for out in outputs)
    return trace.mean() / size, torch.stack(second).mean() / size


def _inner(a: Tensor, b: Tensor) -> Tensor:
    dtype = compute_dtype(a.dtype)
    a, b = a.to_dense().to(dtype), b.to_dense().to(dtype)
    return (a * b).sum(dtype=torch.float64).to(dtype)


def bfk_ratio(m1: Tensor, m2: Tensor) -> Tensor:
    r""":math:`M_1 / \sqrt{M_2}`: the cosine of the backward-feature angle where b is independent of the kernel.

    Args:
        m1, m2: as :func:`bfk_moments` gives them.

    Returns:
        A scalar in [0, 1], of estimates by random signs too; 1 where all eigenvalues are the same, NaN if the kernel
        is zero.

    Source: "The Feature Speed Formula", Theorem 3.2.

    Example:
        >>> import torch
        >>> eigenvalues = torch.tensor([1.0, 3.0])
        >>> bfk_ratio(eigenvalues.mean(), eigenvalues.square().mean())
        tensor(0.8944)
    """
    return ratio(m1, m2.sqrt())


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
    if before.shape != after.shape:
        raise ValueError(f"h_before {tuple(before.shape)} and h_after {tuple(after.shape)} must have one shape")
    dtype = common_dtype(before, after)
    size = largest(before)
    before, change = before.to(dtype) / size, (after.to(dtype) - before.to(dtype)) / size
    with torch.autocast(before.device.type, enabled=False):
        mixed = change @ before.T  # F after less F before cancels; its parts do not
        return ratio(whole_length(mixed + mixed.T + change @ change.T), whole_length(before @ before.T)).to(dtype)


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
    require_alike(b_before=b_before, b_after=b_after)
    dtype = common_dtype(b_before, b_after)
    return ratio(whole_length(b_after.to(dtype) - b_before.to(dtype)), whole_length(b_before)).to(dtype)


@torch.no_grad()
def weight_cancellation(W: Tensor, dW: Tensor, *, tol: float = 0.01, exact: bool = False) -> Tensor:
    r""":math:`\|W + dW\|_* / (\|W\|_* + \|dW\|_*)`: whether an update takes away what was there.

    Args:
        W: (..., m, n) weights before the step.
        dW: their updates, the same shape.
        tol, exact: as in :func:`spectral_monitor.functional.spectral_norm`.

    Returns:
        (...) values in [0, 1]: 1 where the two add up, 0 where they cancel; NaN if both are zero.

    Raises:
        ValueError: shapes differ, or no real floating-point matrices.

    Source: "A Spectral Condition for Feature Learning", Assumption 1 (Eq. 11).

    Example:
        >>> import torch
        >>> weight_cancellation(torch.eye(2), -0.5 * torch.eye(2))
        tensor(0.3333)
    """
    require_alike(W=W, dW=dW)
    dtype = common_dtype(W, dW)
    W, dW = W.to(dtype) / 2, dW.to(dtype) / 2  # halves, whose sum stays in range
    before, update, after = (spectral_norm(part, tol=tol, exact=exact) for part in (W, dW, W + dW))
    return ratio(after, before + update).clamp(max=1)  # norms are estimates


@torch.no_grad()
def feature_cancellation(h: Tensor, dh: Tensor) -> Tensor:
    r"""Mean over rows of :math:`\|h + dh\| / (\|h\| + \|dh\|)`: whether a step takes away the features that were there.

    Args:
        h: (rows, m) features before the step.
        dh: their change, the same shape.

    Returns:
        A scalar in [0, 1]. Rows that are zero in both are left out; NaN if that leaves none.

    Raises:
        ValueError: not (rows, features), or shapes differ.

    Source: "A Spectral Condition for Feature Learning", Assumption 1 (Eq. 12).

    Example:
        >>> import torch
        >>> feature_cancellation(torch.ones(5, 3), -0.5 * torch.ones(5, 3))
        tensor(0.3333)
    """
    require_alike(h=h, dh=dh)
    before, change = as_rows(h, "h"), as_rows(dh, "dh")
    return mean_ratio(lengths(before + change), lengths(before) + lengths(change)).clamp(max=1).to(common_dtype(h, dh))


@torch.no_grad()
def activation_ratio(h: Tensor, h_in: Tensor) -> Tensor:
    r"""Mean over rows of the length of a layer's inputs over that of the outputs they were made of by an activation.

    Args:
        h: (rows, m) outputs of a layer.
        h_in: inputs of the next one, the same shape.

    Returns:
        A scalar >= 0, for ReLU about 0.7. Rows of zeros in ``h`` are left out; NaN if that leaves none.

    Raises:
        ValueError: not (rows, features), or shapes differ.

    Source: "A Spectral Condition for Feature Learning", Assumption 2 and Fig. 5.

    Example:
        >>> import torch
        >>> h = torch.tensor([[3.0, -4.0], [0.0, 100.0]])
        >>> activation_ratio(h, h.relu())
        tensor(0.8000)
    """
    require_alike(h=h, h_in=h_in)
    outputs, inputs = as_rows(h, "h"), as_rows(h_in, "h_in")
    return mean_ratio(lengths(inputs), lengths(outputs)).to(common_dtype(h, h_in))


@torch.no_grad()
def sample_share(h_in: Tensor, b: Tensor, rows: Tensor | None = None) -> Tensor:
    """Mean over rows i of ``|g_i h'_i| / |g h'_i|``: what part a row has in what the gradient does to it.

    The gradient ``g`` is the sum of the rows' own, ``g_i = b_i h'_i^T``.

    Args:
        h_in: (rows, n) all inputs of a matrix.
        b: (rows, m) gradients of its outputs.
        rows: indices of the rows the mean is taken over; all if ``None``.

    Returns:
        A scalar >= 0: about 1 over the root of the number of rows where they are unlike, below where they are alike.
        Rows with g h' = 0 are left out; NaN if that leaves none.

    Raises:
        ValueError: not (rows, features), or not as many of both.

    Source: "A Spectral Condition for Feature Learning", Assumption 3 and Fig. 6.

    Example:
        >>> import torch
        >>> sample_share(torch.ones(4, 3), torch.ones(4, 2))  # alike in all: a fourth each
        tensor(0.2500)
    """
    x, gradients = as_rows(h_in, "h_in"), as_rows(b, "b")
    if len(x) != len(gradients):
        raise ValueError(f"h_in {tuple(x.shape)} and b {tuple(gradients.shape)} must have as many rows")
    dtype = common_dtype(x, gradients)
    x, gradients, size = x.to(dtype), gradients.to(dtype), largest(x)
    some, own = (x, gradients) if rows is None else (x[rows], gradients[rows])
    some = some / size
    with torch.autocast(x.device.type, enabled=False):
        whole = lengths(((some @ x.T) / size) @ gradients)  # it does not depend on the size of x
    return mean_ratio(lengths(own) * lengths(some).square(), whole).to(dtype)
