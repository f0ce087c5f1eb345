"""Kernels of gradient descent, and assumptions of the papers: cancellation, activations, shares."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from spectral_monitor.functional.feature_speed import require_real_pair
from spectral_monitor.functional.features import as_rows, mean_ratio
from spectral_monitor.functional.norms import ratio, spectral_norm
from spectral_monitor.functional.vector_norms import common_dtype, largest, lengths
from spectral_monitor.linalg import extreme_ritz_values
from spectral_monitor.linalg.kernel_products import Product, backward_to_feature, check_ways, feature_to_backward, inner


def signs(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return random signs, float32 on the CPU: a Hutchinson probe, whose outer product averages to the identity.

    Example:
        >>> signs((2, 3), torch.Generator().manual_seed(0)).abs()
        tensor([[1., 1., 1.],
                [1., 1., 1.]])
    """
    drawn: Tensor = torch.randint(0, 2, tuple(shape), generator=generator, device="cpu") * 2.0 - 1.0
    return drawn


def bfk_moments(
    outputs: Sequence[Tensor], parameters: Sequence[Tensor], rates: Sequence[float], probes: Sequence[Sequence[Tensor]]
) -> tuple[Tensor, Tensor]:
    """Moments ``M_p = tr K^p / m``, p = 1, 2, of the backward-to-feature kernel.

    The kernel ``K`` is the sum of ``lr J J^T`` over the parameters, with ``J`` the derivative of the features by each:
    ``-K b`` is the velocity of the features under gradient descent. It is never formed. For a probe z, ``J^T z`` is one
    backward pass, and ``K z`` another one through that; M_1 is the mean of ``<z, K z> / m``, M_2 of ``|K z|^2 / m``.

    Args:
        outputs: the features, m entries in all, with the graph that leads to them, which is retained.
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
    _check(outputs, parameters, rates, probes)
    _check_graph(outputs)
    return _moments(backward_to_feature(outputs, parameters, rates), probes, outputs)


def bfk_extremes(
    outputs: Sequence[Tensor], parameters: Sequence[Tensor], rates: Sequence[float], start: Sequence[Tensor], steps: int
) -> tuple[Tensor, Tensor]:
    """Bracket inside the extreme eigenvalues of the backward-to-feature kernel, by Lanczos.

    The cosine of the backward-feature angle is at least ``lambda_min / lambda_max``. The smaller value here is an upper
    bound of ``lambda_min`` and the larger one a lower bound of ``lambda_max``, so their ratio is an upper bound of this
    guarantee. The larger one is close to ``lambda_max`` after a few steps. The smaller one may not be: many kernels
    have clustered eigenvalues near 0, which converge last.

    Args:
        outputs, parameters, rates: as :func:`bfk_moments` takes them.
        start: a tensor for every output, of its shape, such as random signs (:func:`signs`).
        steps: products with the kernel, two passes each.

    Returns:
        Two scalars >= 0 on the CPU, float64.

    Raises:
        ValueError, RuntimeError: as :func:`bfk_moments`.

    Source: "The Feature Speed Formula", Theorem 3.2 (i).

    Example:
        >>> import torch
        >>> w, x = torch.ones(2, requires_grad=True), torch.tensor([1.0, 2.0])
        >>> low, high = bfk_extremes([w * x], [w], [1.0], [torch.ones(2)], 2)  # K is diagonal, the squares of x
        >>> round(low.item(), 4), round(high.item(), 4)
        (1.0, 4.0)
    """
    _check(outputs, parameters, rates, [start])
    _check_graph(outputs)
    multiply, dtype = backward_to_feature(outputs, parameters, rates), common_dtype(*outputs)
    sizes = [out.numel() for out in outputs]
    ways: list[tuple[Tensor, Tensor]] = []

    def product(x: Tensor) -> Tensor:
        """Return the kernel times a vector; note its quadratic form, computed both ways."""
        probe = [part.view(out.shape) for part, out in zip(x.split(sizes), outputs, strict=True)]
        square, image = multiply(probe)
        ways.append((square, inner(probe, image)))
        return torch.cat([part.flatten().to(dtype) for part in image])

    first = torch.cat([part.flatten().to(outputs[0].device, dtype) for part in start])
    low, high = extreme_ritz_values(product, first, steps).clamp(min=0)
    check_ways(ways, outputs)
    return low, high


def dual_bfk_moments(
    loss: Tensor,
    outputs: Sequence[Tensor | GradientEdge],
    parameters: Sequence[Tensor],
    rates: Sequence[float],
    probes: Sequence[Sequence[Tensor]],
) -> tuple[Tensor, Tensor]:
    r"""Moments ``M_p = tr K~^p / m``, p = 1, 2, of the feature-to-backward kernel, the dual of the kernel above.

    A step of gradient descent on the weights ``w_l`` behind a layer changes the gradient ``b`` of its features by
    ``-sum_l lr_l B_l g_l`` for small rates: ``B_l`` is the derivative of ``b`` by ``w_l`` at fixed features ``f``, and
    ``g_l`` the gradient of ``w_l``. Where the loss is linear and the network behind the layer positively homogeneous in
    ``f``, so is ``g_l``, and Euler's identity with the symmetry of second derivatives says ``g_l = B_l^T f``. So
    ``db/dt = -K~ f`` with ``K~ = sum_l lr_l B_l B_l^T``, the sum over the weights behind the layer. For a matrix of a
    perceptron ``g_l = b_l h_l^T`` with inputs ``h_l``. With ``B_l^T u = b_l (J_l u)^T``, ``J_l`` the derivative of
    ``h_l`` by ``f``, the paper's form ``K~ = sum_l lr_l |b_l|^2 J_l^T J_l`` follows. For other losses and activations
    the moments are those of the sum of ``lr B B^T``.

    It is never formed. ``B^T u`` is one pass through the graph of ``b``, and ``B y`` one through that of ``g``, because
    both are the same second derivatives of the loss.

    Args:
        loss: a scalar with the graph that leads to it, which is retained.
        outputs: the features, m entries in all, or their edges in the graph.
        parameters: weights; those before the outputs are left out.
        rates: the learning rate of each.
        probes: each a tensor for every output, of its shape; as in :func:`bfk_moments`.

    Returns:
        Two scalars, 0 where no weight behind changes b.

    Raises:
        ValueError: no probes, not as many rates as parameters, a probe not like the outputs, a loss that does not
            depend on the outputs.
        RuntimeError: an operation in the graph that torch cannot differentiate twice.

    Source: "The Feature Speed Formula", Eq. 14 and Lemma A.1, where the minus sign is left out.

    Example:
        >>> import torch
        >>> W, f = torch.ones(1, 2, requires_grad=True), torch.tensor([1.0, 2.0], requires_grad=True)
        >>> m1, m2 = dual_bfk_moments(3 * (W @ f).sum(), [f], [W], [0.1], [[torch.tensor([1.0, -1.0])]])  # 0.1 * 3^2
        >>> m1, m2
        (tensor(0.9000), tensor(0.8100))
    """
    b, multiply = feature_to_backward(loss, outputs, parameters, rates)
    _check(b, parameters, rates, probes)
    return _moments(multiply, probes, b)


def _moments(multiply: Product, probes: Sequence[Sequence[Tensor]], outputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    first, second, ways = [], [], []
    for probe in probes:
        square, image = multiply(probe)
        first.append(square)
        second.append(inner(image, image))
        ways.append((square, inner(probe, image)))
    check_ways(ways, outputs)
    size = sum(out.numel() for out in outputs)
    return torch.stack(first).mean() / size, torch.stack(second).mean() / size


def _check(
    outputs: Sequence[Tensor], parameters: Sequence[Tensor], rates: Sequence[float], probes: Sequence[Sequence[Tensor]]
) -> None:
    if not probes or len(parameters) != len(rates):
        raise ValueError(
            f"{len(probes)} probes, {len(rates)} rates for {len(parameters)} parameters: need >= 1, and all"
        )
    shapes = [tuple(out.shape) for out in outputs]
    for probe in probes:
        if [tuple(z.shape) for z in probe] != shapes:
            raise ValueError(f"probes must be like the outputs {shapes}, got {[tuple(z.shape) for z in probe]}")


def _check_graph(outputs: Sequence[Tensor]) -> None:
    if not all(out.requires_grad for out in outputs):
        raise ValueError(f"outputs {[tuple(out.shape) for out in outputs]} must have a graph that leads to them")


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
def weight_cancellation(W: Tensor, dW: Tensor, *, tol: float = 0.01, exact: bool = False) -> Tensor:
    r""":math:`\|W + dW\|_* / (\|W\|_* + \|dW\|_*)`: whether an update cancels the weights.

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
    require_real_pair(W=W, dW=dW)
    dtype = common_dtype(W, dW)
    W, dW = W.to(dtype) / 2, dW.to(dtype) / 2  # the sum of halves stays in range
    before, update, after = (spectral_norm(part, tol=tol, exact=exact) for part in (W, dW, W + dW))
    return ratio(after, before + update).clamp(max=1)  # norms are estimates


@torch.no_grad()
def feature_cancellation(h: Tensor, dh: Tensor) -> Tensor:
    r"""Mean over rows of :math:`\|h + dh\| / (\|h\| + \|dh\|)`: whether a step cancels the features.

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
    require_real_pair(h=h, dh=dh)
    before, change = as_rows(h, "h"), as_rows(dh, "dh")
    return mean_ratio(lengths(before + change), lengths(before) + lengths(change)).clamp(max=1).to(common_dtype(h, dh))


@torch.no_grad()
def activation_ratio(h: Tensor, h_in: Tensor) -> Tensor:
    r"""Mean over rows of the length of an activation's outputs over that of its inputs, which are a layer's outputs.

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
    require_real_pair(h=h, h_in=h_in)
    outputs, inputs = as_rows(h, "h"), as_rows(h_in, "h_in")
    return mean_ratio(lengths(inputs), lengths(outputs)).to(common_dtype(h, h_in))


@torch.no_grad()
def sample_share(h_in: Tensor, b: Tensor, rows: Tensor | None = None) -> Tensor:
    """Mean over rows i of ``|g_i h'_i| / |g h'_i|``: the share of a row in the gradient's effect on it.

    The gradient ``g`` is the sum of the rows' own, ``g_i = b_i h'_i^T``.

    Args:
        h_in: (rows, n) all inputs of a matrix.
        b: (rows, m) gradients of its outputs.
        rows: indices of the rows the mean is taken over; all if ``None``.

    Returns:
        A scalar >= 0: about 1 over the root of the number of rows if they are independent, less if they are similar.
        Rows with g h' = 0 are left out; NaN if that leaves none.

    Raises:
        ValueError: not (rows, features), or numbers of rows differ.

    Source: "A Spectral Condition for Feature Learning", Assumption 3 and Fig. 6.

    Example:
        >>> import torch
        >>> sample_share(torch.ones(4, 3), torch.ones(4, 2))  # equal rows: a fourth each
        tensor(0.2500)
    """
    x, gradients = as_rows(h_in, "h_in"), as_rows(b, "b")
    if len(x) != len(gradients):
        raise ValueError(f"h_in {tuple(x.shape)} and b {tuple(gradients.shape)} must have as many rows")
    dtype = common_dtype(x, gradients)
    x, gradients, size = x.to(dtype), gradients.to(dtype), largest(x)
    inputs, own_gradients = (x, gradients) if rows is None else (x[rows], gradients[rows])
    inputs = inputs / size  # the size of x cancels
    with torch.autocast(x.device.type, enabled=False):
        total = lengths(((inputs @ x.T) / size) @ gradients)
    return mean_ratio(lengths(own_gradients) * lengths(inputs).square(), total).to(dtype)
