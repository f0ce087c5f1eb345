"""Two hidden layers without activation at infinite width: each variable is a vector of coefficients.

Population 1 has the basis ``U_1..U_d, G_0, G_1, ...``, population 2 the basis ``V_1..V_k, F_0, F_1, ...``. Gram
matrices of the bases are ``diag(su^2, sw^2 D)`` and ``diag(sv^2, sw^2 C)``, with C(s, t) = E[x_s x_t] and
D(s, t) = E[delta_s delta_t].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from spectral_monitor.limits.linear import check_sizes
from spectral_monitor.limits.populations import checked_derivatives, rates_of


class LinearPopulations:
    """A linear perceptron with two hidden layers of infinite width, exactly.

    Args:
        d: number of inputs.
        k: number of outputs.
        lr: learning rate, or those of the three matrices, as for :class:`spectral_monitor.limits.Populations`.
        examples: the largest number of examples, over all steps.
        su, sw, sv: standard deviations at the start.
        decoupled: leave out correlations between the forward and the backward use of a matrix.

    Raises:
        ValueError: sizes below 1.

    Source: "Feature Learning in Infinite-Width Neural Networks", Theorem 6.4 with ``phi(z) = z``.

    Example:
        >>> import torch
        >>> limit = LinearPopulations(1, lr=0.5, examples=2)
        >>> [limit.step(torch.tensor([[x]]), lambda f, y=y: f - y).item() for x, y in ((1.0, 1.0), (-1.0, -1.0))]
        [0.0, -1.5]
    """

    def __init__(
        self,
        d: int,
        k: int = 1,
        *,
        lr: float | Sequence[float],
        examples: int,
        su: float = 1.0,
        sw: float = 1.0,
        sv: float = 1.0,
        decoupled: bool = False,
    ) -> None:
        check_sizes(d=d, k=k, examples=examples)
        self.d, self.k, self.examples, self.sw, self.coupled = d, k, examples, sw, not decoupled
        self._rates = rates_of(lr, 3)
        self._gram1 = torch.zeros(d + examples, d + examples, dtype=torch.float64)
        self._gram2 = torch.zeros(k + examples, k + examples, dtype=torch.float64)
        self._gram1[:d, :d] = su**2 * torch.eye(d)
        self._gram2[:k, :k] = sv**2 * torch.eye(k)
        self._V = torch.eye(k, k + examples, dtype=torch.float64)
        self._inputs: list[Tensor] = []
        self._x: list[Tensor] = []  # outputs of population 1
        self._h: list[Tensor] = []  # outputs of population 2
        self._dx: list[Tensor] = []
        self._delta: list[Tensor] = []

    def step(self, x: Tensor, loss_derivative: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the outputs (B, k) at inputs (B, d), then take a step of SGD on them.

        Args:
            x, loss_derivative: as for :meth:`spectral_monitor.limits.Populations.step`.

        Raises:
            ValueError: inputs or derivatives of another shape, or too many examples.
        """
        if x.ndim != 2 or x.shape[1] != self.d or len(x) == 0:
            raise ValueError(f"x must be (batch, {self.d}), got {tuple(x.shape)}")
        start = len(self._delta)  # the number of indices of earlier steps
        if start + len(x) > self.examples:
            raise ValueError(f"there is room for {self.examples} examples, and {start} of them are taken")
        f = torch.stack([self._forward(xi) for xi in x.double()])
        chi = checked_derivatives(loss_derivative(f), f)
        V = self._V - self._rates[2] * chi.T @ torch.stack(self._h[start:])
        for t in range(start, start + len(x)):
            self._backward(t, start, chi[t - start])
        self._V = V
        return f

    def _forward(self, x: Tensor) -> Tensor:
        """Append an index to both populations; return f (k,)."""
        t, start = len(self._x), len(self._delta)
        # Population 1: x_t = <xi_t, U> - lr sum_{s<t} <xi_s, xi_t> dx_s, s of earlier steps
        x_t = torch.zeros(self.d + self.examples, dtype=torch.float64)
        x_t[: self.d] = x
        for earlier, dx in zip(self._inputs[:start], self._dx, strict=True):
            x_t = x_t - self._rates[0] * (earlier @ x) * dx
        self._inputs.append(x)
        self._x.append(x_t)
        # Population 2: h_t = F_t + sum_{s<t} [sw^2 (coefficient of G_s in x_t) - lr C(s, t)] delta_s
        C = torch.stack([x_s @ self._gram1 @ x_t for x_s in self._x])
        row = slice(self.k, self.k + t + 1)
        self._gram2[self.k + t, row] = self._gram2[row, self.k + t] = self.sw**2 * C
        h_t = torch.zeros(self.k + self.examples, dtype=torch.float64)
        h_t[self.k + t] = 1.0
        for s, delta in enumerate(self._delta):
            h_t = h_t + (self.coupled * self.sw**2 * x_t[self.d + s] - self._rates[1] * C[s]) * delta
        self._h.append(h_t)
        return self._V @ self._gram2 @ h_t

    def _backward(self, t: int, start: int, chi: Tensor) -> None:
        """Append delta_t and dx_t."""
        delta_t = chi @ self._V
        self._delta.append(delta_t)
        # dx_t = G_t + sum_{s<=t} sw^2 (coefficient of F_s in delta_t) x_s - lr sum_{s<t} D(s, t) x_s
        D = torch.stack([delta_s @ self._gram2 @ delta_t for delta_s in self._delta])
        row = slice(self.d, self.d + t + 1)
        self._gram1[self.d + t, row] = self._gram1[row, self.d + t] = self.sw**2 * D
        dx = torch.zeros(self.d + self.examples, dtype=torch.float64)
        dx[self.d + t] = 1.0
        for s, x_s in enumerate(self._x[: t + 1]):
            dx = dx + (self.coupled * self.sw**2 * delta_t[self.k + s] - self._rates[1] * D[s] * (s < start)) * x_s
        self._dx.append(dx)
