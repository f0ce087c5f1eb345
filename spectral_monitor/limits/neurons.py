"""Perceptrons with one hidden layer of infinite width and any activation, by weighted neurons.

Each neuron is a point (u, v) of the distribution of input and output weights, with a weight w; the weights add up to
1. Expectations over the distribution are weighted sums. Where inputs and outputs are at most three in number, points
are the nodes of a Gauss-Hermite rule, and nothing is drawn at random.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from spectral_monitor.limits.linear import check_sizes
from spectral_monitor.limits.populations import Activation, checked_derivatives, rates_of

NODES = 60
"""Nodes of the Gauss-Hermite rule in each dimension."""

DRAWN = 2**17
"""Points in more dimensions: half from Sobol's sequence, half mirrored in v."""


class WeightedNeurons:
    """A perceptron with one hidden layer of infinite width under maximal updates.

    Entries begin as ``U ~ N(0, su^2)``, ``V ~ N(0, sv^2 / n^2)``; as applied, SGD moves them at rates ``lr n`` and
    ``lr / n``. With a polynomial activation of degree 2 or more take few steps only: later, moments depend on neurons
    so rare that no finite network has one.

    Args:
        d: number of inputs.
        k: number of outputs.
        phi: activation; differentiable by autograd.
        lr: learning rate, or those of U and V.
        su, sv: standard deviations at the start, see above.
        nodes: of the Gauss-Hermite rule in each dimension, if ``d + k <= 3``.
        seed: of Sobol's sequence, if ``d + k > 3``.

    Raises:
        ValueError: sizes below 1, or learning rates that are not one for each matrix.

    Source: "Feature Learning in Infinite-Width Neural Networks", Theorem 6.1.

    Example:
        >>> import torch
        >>> limit = WeightedNeurons(1, 1, torch.tanh, lr=0.5)
        >>> one = torch.ones(1, 1)
        >>> for _ in range(3):
        ...     f = limit.step(one, lambda f: f - 1)
        >>> round(f.item(), 3), round(limit(one).item(), 3)
        (0.614, 0.751)
    """

    def __init__(
        self,
        d: int,
        k: int,
        phi: Activation,
        *,
        lr: float | Sequence[float],
        su: float = 1.0,
        sv: float = 1.0,
        nodes: int = NODES,
        seed: int = 0,
    ) -> None:
        check_sizes(d=d, k=k, nodes=nodes)
        self.phi, self._rates = phi, rates_of(lr, 2)
        if d + k <= 3:
            points, self.weights = _rule(d + k, nodes)
        else:
            points = drawn_points(d, k, DRAWN, seed)
            self.weights = torch.full((DRAWN,), 1 / DRAWN, dtype=torch.float64)
        self.U, self.V = su * points[:, :d], sv * points[:, d:]  # (N, d) and (N, k)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the outputs (B, k) of inputs (B, d)."""
        return self.features(x).T @ (self.weights[:, None] * self.V)

    def features(self, x: Tensor) -> Tensor:
        """Return the hidden features (N, B) of inputs (B, d); for means over the layer weight rows by ``weights``.

        Raises:
            ValueError: inputs of another shape.
        """
        d = self.U.shape[1]
        if x.ndim != 2 or x.shape[1] != d:
            raise ValueError(f"x must be (batch, {d}), got {tuple(x.shape)}")
        return self.phi(self.U @ x.double().T).detach()

    def feature_kernel(self, x: Tensor, z: Tensor) -> Tensor:
        """Return the mean over the layer of products of features (B, C) of inputs (B, d) and (C, d)."""
        return self.features(x).T @ (self.weights[:, None] * self.features(z))

    def step(self, x: Tensor, loss_derivative: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the outputs (B, k) at inputs (B, d), then take a step of SGD on them.

        Args:
            x, loss_derivative: as for :meth:`spectral_monitor.limits.Populations.step`.

        Raises:
            ValueError: inputs or derivatives of another shape.
        """
        features = self.features(x)  # (N, B)
        f = features.T @ (self.weights[:, None] * self.V)
        chi = checked_derivatives(loss_derivative(f), f)
        with torch.enable_grad():
            h = (self.U @ x.double().T).requires_grad_()
            (slope,) = torch.autograd.grad(self.phi(h).sum(), h, materialize_grads=True)
        # Both from the old values; without the weight w, which belongs to expectations only.
        V = self.V - self._rates[1] * features @ chi
        self.U = self.U - self._rates[0] * (slope * (self.V @ chi.T)) @ x.double()
        self.V = V
        return f


def _rule(dimensions: int, nodes: int) -> tuple[Tensor, Tensor]:
    """Return points (N, dimensions) and weights (N,) of the tensor Gauss-Hermite rule for N(0, 1)."""
    z, w = (torch.from_numpy(part) for part in np.polynomial.hermite_e.hermegauss(nodes))
    w = w / math.sqrt(2 * math.pi)
    points = torch.cartesian_prod(*[z] * dimensions).reshape(-1, dimensions)
    weights = torch.cartesian_prod(*[w] * dimensions).reshape(-1, dimensions).prod(1)
    return points, weights


def drawn_points(d: int, k: int, count: int, seed: int) -> Tensor:
    """Return points (count, d + k) for N(0, 1), of a scrambled Sobol sequence in pairs (u, v) and (u, -v)."""
    sobol = torch.quasirandom.SobolEngine(d + k, scramble=True, seed=seed)
    uniform = sobol.draw(count // 2, dtype=torch.float64).clamp(1e-12, 1 - 1e-12)
    half = math.sqrt(2) * torch.erfinv(2 * uniform - 1)
    sign = torch.ones(d + k, dtype=torch.float64)
    sign[d:] = -1
    return torch.cat([half, half * sign])
