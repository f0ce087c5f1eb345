"""Perceptrons of infinite width with any activation and depth, by populations of neurons.

Notation: L hidden layers, N particles in each population, S indices (step, example) so far; ``x^l_t`` are features of
population l at index t, ``dx^l_t`` what they receive from above, ``h^l_t`` inputs of the activation,
``delta^l_t = phi'(h^l_t) dx^l_t``. Each is a vector of N particles. A
population holds Gaussians F_t, which stand for the start of the matrix below applied to features, and G_t, which stand
for the transpose of the matrix above applied to deltas. Expectations are means within one population; populations meet
only in those numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

Activation = Callable[[Tensor], Tensor]


class _Gaussians:
    """Gaussian vectors of N particles, drawn one by one, each given all before it."""

    def __init__(self, n: int, generator: torch.Generator) -> None:
        self.n, self.generator = n, generator
        self.noise: list[Tensor] = []  # independent standard vectors, (n,)
        self.root = torch.zeros(0, 0, dtype=torch.float64)  # Cholesky factor of the covariance so far, (S, S)
        self.values: list[Tensor] = []  # leaves of autograd, (n,)

    def draw(self, covariance: Tensor) -> Tensor:
        """Return the next vector; ``covariance`` (S + 1,) is that with all before and with itself."""
        # One more row of the Cholesky factor: root a = covariance with the earlier; the rest is independent.
        S = len(self.values)
        row = torch.linalg.solve_triangular(self.root, covariance[:S, None], upper=False)[:, 0]
        rest = (covariance[S] - row.square().sum()).item()
        last = rest**0.5 if rest > 1e-10 * covariance[S].item() else 0.0
        root = torch.eye(S + 1, dtype=torch.float64)
        root[:S, :S], root[S, :S] = self.root, row
        # A vector that earlier ones determine has no noise; a diagonal of 1 keeps the factor regular.
        root[S, S] = last if last > 0 else 1.0
        self.root = root
        noise = torch.randn(self.n // 2, generator=self.generator, dtype=torch.float64)
        noise = torch.cat([noise, -noise]) if last > 0 else torch.zeros(self.n, dtype=torch.float64)
        self.noise.append(noise)
        value = noise * last
        for weight, earlier in zip(row.tolist(), self.noise[:S], strict=True):
            value = value + weight * earlier
        self.values.append(value.requires_grad_())
        return self.values[-1]


@dataclass
class _Population:
    """One hidden layer: what its particles hold at every index."""

    below: _Gaussians | None
    above: _Gaussians | None
    x: list[Tensor] = field(default_factory=list)
    dx: list[Tensor] = field(default_factory=list)
    h: list[Tensor] = field(default_factory=list)
    slope: list[Tensor] = field(default_factory=list)
    delta: list[Tensor] = field(default_factory=list)


class Populations:
    """A perceptron of infinite width under maximal updates, one example a step.

    Entries begin as ``U ~ N(0, su^2)``, ``W ~ N(0, sw^2 / n)``, ``V ~ N(0, sv^2 / n^2)``; as applied, SGD moves them at
    rates ``lr n``, ``lr`` and ``lr / n``.

    Args:
        d: number of inputs.
        depth: number of hidden layers.
        phi: activation; differentiable by autograd, twice where there are two hidden layers or more.
        lr: learning rate.
        n: particles in each population, an even number; errors go as ``1/sqrt(n)``.
        su, sw, sv: standard deviations at the start, see above.
        decoupled: leave out what the same matrix does forwards and backwards, as if the transpose were independent.
        seed: of the particles.

    Raises:
        ValueError: sizes below 1, or an odd number of particles.

    Source: "Feature Learning in Infinite-Width Neural Networks", Theorems 6.1, 6.3 and 6.4. In the last, the backward
    correction runs over r <= t, not r < t as printed: ``dx_t`` multiplies a delta that depends on W at the same step.

    Example:
        >>> import torch
        >>> limit = Populations(1, 2, lambda z: z, lr=0.5, n=4000)
        >>> one = torch.ones(1)
        >>> abs(limit.step(one, lambda f: f - 1)) < 0.1
        True
    """

    def __init__(
        self,
        d: int,
        depth: int,
        phi: Activation,
        *,
        lr: float,
        n: int = 100_000,
        su: float = 1.0,
        sw: float = 1.0,
        sv: float = 1.0,
        decoupled: bool = False,
        seed: int = 0,
    ) -> None:
        for name, size in {"d": d, "depth": depth}.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if n < 2 or n % 2:
            raise ValueError(f"n must be an even number of particles >= 2, got {n}")
        self.phi, self.lr, self.sw, self.decoupled = phi, lr, sw, decoupled
        generator = torch.Generator().manual_seed(seed)

        def gaussians(there: bool) -> _Gaussians | None:
            return _Gaussians(n, generator) if there else None

        self._layers = [_Population(gaussians(i > 0), gaussians(i < depth - 1)) for i in range(depth)]
        half = torch.randn(n // 2, d, generator=generator, dtype=torch.float64)
        self._U = su * torch.cat([half, half if depth == 1 else -half])
        readout = torch.randn(n // 2, generator=generator, dtype=torch.float64)
        self._V = sv * torch.cat([readout, -readout])  # in pairs, so that f = 0 at the start with one hidden layer
        self._inputs: list[Tensor] = []

    def step(self, x: Tensor, loss_derivative: Callable[[float], float]) -> float:
        """Return the output at an input (d,), then take a step of SGD on it.

        Args:
            x: (d,) input.
            loss_derivative: from the output to the derivative of the loss with respect to it.

        Raises:
            ValueError: an input of another shape.
        """
        if x.shape != (self._U.shape[1],):
            raise ValueError(f"x must be ({self._U.shape[1]},), got {tuple(x.shape)}")
        x = x.double()
        top = self._layers[-1]
        # Forward, population by population.
        for index in range(len(self._layers)):
            self._forward(index, x)
        f = (self._V * top.x[-1]).mean().item()
        chi = loss_derivative(f)
        # Backward: the readout's weights are what the last population receives from above.
        top.dx.append(chi * self._V)
        top.delta.append(top.slope[-1] * top.dx[-1])
        for index in reversed(range(len(self._layers) - 1)):
            self._backward(index)
        self._inputs.append(x)
        self._V = self._V - self.lr * chi * top.x[-1]
        return float(f)

    def _forward(self, index: int, x: Tensor) -> None:
        """Append h_t, x_t and phi'(h_t) of one population."""
        here = self._layers[index]
        if here.below is None:
            # h_t = <xi_t, U> - lr sum_{s<t} <xi_s, xi_t> delta_s
            h = self._U @ x
            for earlier, delta in zip(self._inputs, here.delta, strict=True):
                h = h - self.lr * float(earlier @ x) * delta
        else:
            # h_t = F_t + sum_{s<t} [sw^2 E(d x_t / d G_s) - lr C(s, t)] delta_s
            before = self._layers[index - 1]
            above = before.above
            assert above is not None
            C = torch.stack([(past.detach() * before.x[-1].detach()).mean() for past in before.x])  # (t + 1,)
            h = here.below.draw(self.sw**2 * C)
            slopes = self._derivatives(before.x[-1], above.values)
            for s, delta in enumerate(here.delta):
                h = h + (self.sw**2 * slopes[s] - self.lr * C[s].item()) * delta
        if not h.requires_grad:
            h.requires_grad_()
        with torch.enable_grad():
            out = self.phi(h)
            (slope,) = torch.autograd.grad(out.sum(), h, create_graph=len(self._layers) > 1, allow_unused=True)
        here.h.append(h)
        here.x.append(out)
        here.slope.append(torch.zeros_like(h) if slope is None else slope)
        if len(self._layers) == 1:  # no derivative is asked for: keep no graph
            here.x[-1], here.slope[-1], here.h[-1] = out.detach(), here.slope[-1].detach(), h.detach()

    def _backward(self, index: int) -> None:
        """Append dx_t and delta_t of one population below the last."""
        here, after = self._layers[index], self._layers[index + 1]
        assert here.above is not None
        assert after.below is not None
        # dx_t = G_t + sum_{s<=t} sw^2 E(d delta_t / d F_s) x_s - lr sum_{s<t} D(s, t) x_s
        now = after.delta[-1]
        D = torch.stack([(past.detach() * now.detach()).mean() for past in after.delta])  # (t + 1,)
        dx = here.above.draw(self.sw**2 * D)
        slopes = self._derivatives(now, after.below.values)
        for s, x in enumerate(here.x):
            dx = dx + self.sw**2 * slopes[s] * x
        for s, x in enumerate(here.x[:-1]):
            dx = dx - self.lr * D[s].item() * x
        here.dx.append(dx)
        here.delta.append(here.slope[-1] * dx)

    def _derivatives(self, value: Tensor, leaves: list[Tensor]) -> list[float]:
        """Return E(d value / d leaf) for each leaf; zeros where the transposed matrix counts as independent."""
        if self.decoupled or not leaves or not value.requires_grad:
            return [0.0] * len(leaves)
        found = torch.autograd.grad(value.sum(), leaves, retain_graph=True, allow_unused=True)
        return [0.0 if g is None else g.mean().item() for g in found]
