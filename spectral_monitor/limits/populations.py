"""Perceptrons of infinite width with any activation and depth, by populations of neurons.

Notation: L hidden layers, N particles in each population, S indices (step, example) so far; ``x^l_t`` are features of
population l at index t, ``dx^l_t`` their gradients from above, ``h^l_t`` inputs of the activation,
``delta^l_t = phi'(h^l_t) dx^l_t``. Each is a vector of N particles. A population holds Gaussians F_t, which represent
the initial matrix below applied to features, and G_t, which represent the transpose of the matrix above applied to
deltas. Expectations are means within one population; populations share only these numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from spectral_monitor.limits.linear import check_sizes

Activation = Callable[[Tensor], Tensor]


class _Gaussians:
    """Gaussian vectors of N particles, drawn one by one, each conditioned on the earlier ones."""

    def __init__(self, n: int, copies: int, generator: torch.Generator) -> None:
        self.n, self.copies, self.generator = n, copies, generator
        self.noise: list[Tensor] = []  # independent standard vectors, (n,)
        self.root = torch.zeros(0, 0, dtype=torch.float64)  # Cholesky factor of the covariance so far, (S, S)
        self.values: list[Tensor] = []  # leaves of autograd, (n,)

    def draw(self, covariance: Tensor) -> Tensor:
        """Return the next vector; ``covariance`` (S + 1,) is with the earlier ones and with itself."""
        # One more row of the Cholesky factor, and an independent rest.
        S = len(self.values)
        row = torch.linalg.solve_triangular(self.root, covariance[:S, None], upper=False)[:, 0]
        variance = (covariance[S] - row.square().sum()).item()
        deviation = variance**0.5 if variance > 1e-10 * covariance[S].item() else 0.0
        root = torch.eye(S + 1, dtype=torch.float64)
        root[:S, :S], root[S, :S] = self.root, row
        # A vector that earlier ones determine has no noise; a diagonal of 1 keeps the factor regular.
        root[S, S] = deviation if deviation > 0 else 1.0
        self.root = root
        noise = _mirrored(self.n, self.copies, self.generator)
        self.noise.append(noise if deviation > 0 else torch.zeros_like(noise))
        value = self.noise[-1] * deviation
        for weight, earlier in zip(row.tolist(), self.noise[:S], strict=True):
            value = value + weight * earlier
        self.values.append(value.requires_grad_())
        return self.values[-1]

    def forget(self) -> None:
        """Undo the last draw."""
        self.noise.pop()
        self.values.pop()
        self.root = self.root[:-1, :-1]


def _mirrored(n: int, copies: int, generator: torch.Generator) -> Tensor:
    """Return n draws of N(0, 1): ``copies`` blocks z, then as many blocks -z."""
    part = torch.randn(n // (2 * copies), generator=generator, dtype=torch.float64)
    return torch.cat([part] * copies + [-part] * copies)


@dataclass
class _Population:
    """One hidden layer: the vectors of its particles at every index."""

    below: _Gaussians | None
    above: _Gaussians | None
    x: list[Tensor] = field(default_factory=list)
    slope: list[Tensor] = field(default_factory=list)
    delta: list[Tensor] = field(default_factory=list)


class Populations:
    """A perceptron of infinite width under maximal updates.

    Entries begin as ``U ~ N(0, su^2)``, ``W ~ N(0, sw^2 / n)``, ``V ~ N(0, sv^2 / n^2)``; as applied, SGD moves them at
    rates ``lr n``, ``lr`` and ``lr / n``. An index s is an example in a step, so S is the batch size times the number
    of steps. Memory is ``O(N S)`` and time ``O(N S^2)``: S = 300 is slow.

    Args:
        d: number of inputs.
        depth: number of hidden layers.
        phi: activation; differentiable by autograd, twice where there are two hidden layers or more, unless
            ``derivatives`` is ``"stein"``.
        lr: learning rate, or one for each of the ``depth + 1`` matrices.
        k: number of outputs.
        n: particles in each population, a multiple of 4; errors are of order ``1/sqrt(n)``.
        su, sw, sv: standard deviations at the start, see above.
        decoupled: leave out correlations between the forward and the backward use of a matrix, as if the transpose
            were independent.
        derivatives: method for expectations of derivatives. ``"stein"`` takes covariances with Gaussians: it needs no
            second derivative of ``phi``, so it suits ReLU, but it is noisier.
        seed: of the particles.

    Raises:
        ValueError: sizes below 1; a number of particles that is no multiple of 4; other ``derivatives``, or
            ``"autograd"`` of a ``phi`` that is piecewise linear; learning rates that are not one for each matrix.

    Source: "Feature Learning in Infinite-Width Neural Networks", Theorems 6.1, 6.3 and 6.4. In the last, the backward
    correction runs over r <= t, not r < t as printed: ``dx_t`` multiplies a delta that depends on W at the same step.
    Equation 39 for Stein's identity.

    Example:
        >>> import torch
        >>> limit = Populations(1, 2, lambda z: z, lr=0.5, n=4000)
        >>> limit.step(torch.ones(1, 1), lambda f: f - 1).item()
        0.0
        >>> bool(limit.predict(torch.ones(1, 1)) > 0)
        True
    """

    def __init__(
        self,
        d: int,
        depth: int,
        phi: Activation,
        *,
        lr: float | Sequence[float],
        k: int = 1,
        n: int = 100_000,
        su: float = 1.0,
        sw: float = 1.0,
        sv: float = 1.0,
        decoupled: bool = False,
        derivatives: Literal["autograd", "stein"] = "autograd",
        seed: int = 0,
    ) -> None:
        check_sizes(d=d, depth=depth, k=k)
        if n < 4 or n % 4:
            raise ValueError(f"n must be a multiple of 4, got {n} particles")
        if derivatives not in ("autograd", "stein"):
            raise ValueError(f"derivatives must be 'autograd' or 'stein', got {derivatives!r}")
        if derivatives == "autograd" and depth > 1 and not decoupled and _jumps(phi):
            raise ValueError("phi is piecewise linear, so autograd misses where its slope jumps: derivatives='stein'")
        self.phi, self.sw, self.decoupled, self.stein = phi, sw, decoupled, derivatives == "stein"
        self._rates = rates_of(lr, depth + 1)
        self._generator = torch.Generator().manual_seed(seed)

        def gaussians(present: bool, copies: int) -> _Gaussians | None:
            return _Gaussians(n, copies, self._generator) if present else None

        # In the last population all sign combinations of (inputs from below, V) occur equally often, so that f = 0 at
        # the start. In the others all vectors change sign together.
        copies = [1] * (depth - 1) + [2]
        self._layers = [_Population(gaussians(i > 0, c), gaussians(i < depth - 1, 1)) for i, c in enumerate(copies)]
        self._U = su * torch.stack([_mirrored(n, copies[0], self._generator) for _ in range(d)], 1)  # (N, d)
        quarter = torch.randn(n // 4, k, generator=self._generator, dtype=torch.float64)
        self._V = sv * torch.cat([quarter, -quarter] * 2)  # (N, k)
        self._inputs: list[Tensor] = []
        self._step_start = 0  # the number of indices of earlier steps

    def predict(self, x: Tensor) -> Tensor:
        """Return the outputs (B, k) at inputs (B, d), and leave the run as it is.

        Raises:
            ValueError: inputs of another shape.
        """
        x, state, outputs = self._checked(x), self._generator.get_state(), []
        for xi in x:
            outputs.append(self._output(xi))
            for layer in self._layers:
                layer.x.pop()
                layer.slope.pop()
                if layer.below is not None:
                    layer.below.forget()
        self._generator.set_state(state)
        return torch.stack(outputs)

    def step(self, x: Tensor, loss_derivative: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the outputs (B, k) at inputs (B, d), then take a step of SGD on them.

        Args:
            x: (B, d) inputs.
            loss_derivative: turns outputs (B, k), in float64, into the derivatives of the loss with respect to them, of
                the same shape, divided by the batch size for a mean.

        Raises:
            ValueError: inputs or derivatives of another shape.
        """
        x = self._checked(x)
        f = torch.stack([self._output(xi) for xi in x])
        chi = checked_derivatives(loss_derivative(f), f)
        top = self._layers[-1]
        for example in range(len(x)):
            # Backward: the last population receives the readout's weights from above.
            top.delta.append(top.slope[self._step_start + example] * (self._V @ chi[example]))
            for index in reversed(range(len(self._layers) - 1)):
                self._backward(index, self._step_start + example)
        # With its graph: later deltas depend on the F_s of this step through V.
        self._V = self._V - self._rates[-1] * torch.stack(top.x[self._step_start :], 1) @ chi
        self._inputs.extend(x)
        self._step_start += len(x)
        return f

    def _checked(self, x: Tensor) -> Tensor:
        d = self._U.shape[1]
        if x.ndim != 2 or x.shape[1] != d or len(x) == 0:
            raise ValueError(f"x must be (batch, {d}), got {tuple(x.shape)}")
        return x.double()

    def _output(self, x: Tensor) -> Tensor:
        """Append an index to every population, forward; return f (k,)."""
        for index in range(len(self._layers)):
            self._forward(index, x)
        return (self._V * self._layers[-1].x[-1][:, None]).mean(0).detach()

    def _forward(self, index: int, x: Tensor) -> None:
        """Append x_t and phi'(h_t) of one population."""
        layer = self._layers[index]
        if layer.below is None:
            # h_t = <xi_t, U> - lr sum_{s<t} <xi_s, xi_t> delta_s
            h = self._U @ x
            for earlier, delta in zip(self._inputs, layer.delta, strict=True):
                h = h - self._rates[0] * float(earlier @ x) * delta
        else:
            # h_t = F_t + sum_{s<t} [sw^2 E(d x_t / d G_s) - lr C(s, t)] delta_s, s of earlier steps
            before = self._layers[index - 1]
            above = before.above
            assert above is not None
            C = torch.stack([(x_s.detach() * before.x[-1].detach()).mean() for x_s in before.x])  # (t + 1,)
            h = layer.below.draw(self.sw**2 * C)
            slopes = self._derivatives(before.x[-1], above, self._step_start)
            for s, delta in enumerate(layer.delta):
                h = h + (self.sw**2 * slopes[s] - self._rates[index] * C[s].item()) * delta
        graph = len(self._layers) > 1 and not (
            self.stein or self.decoupled
        )  # for derivatives with respect to Gaussians
        if not graph:
            h = h.detach()
        if not h.requires_grad:
            h.requires_grad_()
        with torch.enable_grad():
            out = self.phi(h)
            (slope,) = torch.autograd.grad(out.sum(), h, create_graph=graph, materialize_grads=True)
        layer.x.append(out if graph else out.detach())
        layer.slope.append(slope if graph else slope.detach())

    def _backward(self, index: int, t: int) -> None:
        """Append delta_t of one population below the last."""
        layer, after = self._layers[index], self._layers[index + 1]
        assert layer.above is not None
        assert after.below is not None
        # dx_t = G_t + sum_{s<=t} sw^2 E(d delta_t / d F_s) x_s - lr sum_{s<t} D(s, t) x_s, the last of earlier steps
        delta_t = after.delta[-1]
        D = torch.stack([(delta_s.detach() * delta_t.detach()).mean() for delta_s in after.delta])  # (t + 1,)
        dx = layer.above.draw(self.sw**2 * D)
        slopes = self._derivatives(delta_t, after.below, t + 1)
        for s, x in enumerate(layer.x[: t + 1]):
            dx = dx + (self.sw**2 * slopes[s] - self._rates[index + 1] * D[s].item() * (s < self._step_start)) * x
        layer.delta.append(layer.slope[t] * dx)

    def _derivatives(self, value: Tensor, by: _Gaussians, count: int) -> list[float]:
        """Return E(d value / d G_s) for the first Gaussians; zeros if the transposed matrix counts as independent."""
        if self.decoupled or count == 0:
            return [0.0] * count
        if self.stein:
            # G = root z with z independent: the gradient is root^-T E[z value], with E[z value] = E[d value / d z].
            covariances = torch.stack([(z * value).mean() for z in by.noise[:count]])
            root = by.root[:count, :count]
            gradients = torch.linalg.solve_triangular(root.T, covariances[:, None], upper=True)[:, 0]
            return [float(gradient) for gradient in gradients]
        if not value.requires_grad:
            return [0.0] * count
        grads = torch.autograd.grad(value.sum(), by.values[:count], retain_graph=True, materialize_grads=True)
        return [gradient.mean().item() for gradient in grads]


def rates_of(lr: float | Sequence[float], matrices: int) -> tuple[float, ...]:
    """Return one learning rate for each matrix.

    Raises:
        ValueError: several rates, but not one for each matrix.
    """
    rates = tuple(lr) if isinstance(lr, Sequence) else (lr,) * matrices
    if len(rates) != matrices:
        raise ValueError(f"lr must be a number or {matrices} of them, one for each matrix, got {len(rates)}")
    return rates


def checked_derivatives(chi: Tensor, f: Tensor) -> Tensor:
    """Return the loss's derivatives in float64.

    Raises:
        ValueError: not of the outputs' shape.
    """
    if chi.shape != f.shape:
        raise ValueError(f"loss_derivative must return {tuple(f.shape)}, as the outputs are, got {tuple(chi.shape)}")
    return chi.double()


def _jumps(phi: Activation) -> bool:
    """Return whether an activation is piecewise linear: its slope varies, but the second derivative is 0."""
    z = torch.linspace(-4, 4, 4001, dtype=torch.float64).requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(phi(z).sum(), z, create_graph=True, allow_unused=True)
        if slope is None or not slope.requires_grad:
            return slope is not None and bool((slope != slope[0]).any())
        (second,) = torch.autograd.grad(slope.sum(), z, allow_unused=True)
    return bool((slope != slope[0]).any()) and (second is None or not second.any())
