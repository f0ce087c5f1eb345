"""Two hidden layers without activation at infinite width: each variable is a vector of coefficients.

Population 1 has the basis ``U_1..U_d, G_0, G_1, ...``, population 2 the basis ``V, F_0, F_1, ...``. Gram matrices
of the bases are ``diag(su^2, sw^2 D)`` and ``diag(sv^2, sw^2 C)``, with C(s, t) = E[x_s x_t] and
D(s, t) = E[delta_s delta_t].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class LinearPopulations:
    """A linear perceptron with two hidden layers of infinite width and one output, one example a step.

    Args:
        d: number of inputs.
        lr: learning rate under maximal updates, as for :class:`spectral_monitor.limits.Populations`.
        steps: most steps that are taken.
        su, sw, sv: standard deviations at the start.
        decoupled: leave out what the same matrix does forwards and backwards.

    Raises:
        ValueError: sizes below 1.

    Source: "Feature Learning in Infinite-Width Neural Networks", Theorem 6.4 with ``phi(z) = z``.

    Example:
        >>> import torch
        >>> limit = LinearPopulations(1, lr=0.5, steps=2)
        >>> [limit.step(torch.tensor([x]), lambda f, y=x: f - y) for x in (1.0, -1.0)]
        [0.0, -1.5]
    """

    def __init__(
        self,
        d: int,
        *,
        lr: float,
        steps: int,
        su: float = 1.0,
        sw: float = 1.0,
        sv: float = 1.0,
        decoupled: bool = False,
    ) -> None:
        for name, size in {"d": d, "steps": steps}.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        self.d, self.lr, self.steps, self.sw, self.coupled = d, lr, steps, sw, not decoupled
        self._gram1 = torch.zeros(d + steps, d + steps, dtype=torch.float64)
        self._gram2 = torch.zeros(1 + steps, 1 + steps, dtype=torch.float64)
        self._gram1[:d, :d] = su**2 * torch.eye(d)
        self._gram2[0, 0] = sv**2
        self._V = torch.zeros(1 + steps, dtype=torch.float64)
        self._V[0] = 1.0
        self._inputs: list[Tensor] = []
        self._x: list[Tensor] = []
        self._dx: list[Tensor] = []
        self._delta: list[Tensor] = []

    def step(self, x: Tensor, loss_derivative: Callable[[float], float]) -> float:
        """Return the output at an input (d,), then take a step of SGD on it.

        Raises:
            ValueError: an input of another shape, or more steps than there is room for.
        """
        if x.shape != (self.d,):
            raise ValueError(f"x must be ({self.d},), got {tuple(x.shape)}")
        t, x = len(self._x), x.double()
        if t == self.steps:
            raise ValueError(f"steps is {self.steps}, and all of them are taken")
        # Population 1, forward: x_t = <xi_t, U> - lr sum_{s<t} <xi_s, xi_t> dx_s
        below = torch.zeros(self.d + self.steps, dtype=torch.float64)
        below[: self.d] = x
        for earlier, dx in zip(self._inputs, self._dx, strict=True):
            below = below - self.lr * (earlier @ x) * dx
        self._inputs.append(x)
        self._x.append(below)
        # Population 2, forward: h_t = F_t + sum_{s<t} [sw^2 (coefficient of G_s in x_t) - lr C(s, t)] delta_s
        C = torch.stack([past @ self._gram1 @ below for past in self._x])
        self._gram2[1 + t, 1 : t + 2] = self._gram2[1 : t + 2, 1 + t] = self.sw**2 * C
        above = torch.zeros(1 + self.steps, dtype=torch.float64)
        above[1 + t] = 1.0
        for s, delta in enumerate(self._delta):
            above = above + (self.coupled * self.sw**2 * below[self.d + s] - self.lr * C[s]) * delta
        f = (self._V @ self._gram2 @ above).item()
        chi = loss_derivative(f)
        self._delta.append(chi * self._V)
        # Population 1, backward: dx_t = G_t + sum_{s<=t} sw^2 (coefficient of F_s in delta_t) x_s - lr sum_{s<t} D x_s
        now = self._delta[-1]
        D = torch.stack([past @ self._gram2 @ now for past in self._delta])
        self._gram1[self.d + t, self.d : self.d + t + 1] = self._gram1[self.d : self.d + t + 1, self.d + t] = (
            self.sw**2 * D
        )
        dx = torch.zeros(self.d + self.steps, dtype=torch.float64)
        dx[self.d + t] = 1.0
        for s, past in enumerate(self._x):
            dx = dx + (self.coupled * self.sw**2 * now[1 + s] - self.lr * D[s] * (s < t)) * past
        self._dx.append(dx)
        self._V = self._V - self.lr * chi * above
        return float(f)
