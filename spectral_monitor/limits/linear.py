"""Linear networks with one hidden layer, of finite and of infinite width, by one recursion.

Notation: width n, inputs d, outputs k, batch B. ``U`` is (n, d), ``V`` is (k, n), the bias ``b`` is (n,). Both matrices
begin with entries of size ``1/sqrt(n)``: U is the applied matrix over ``sqrt(n)``, V the applied one times ``sqrt(n)``,
so that one learning rate that does not depend on n is muP.

At infinite width every column of U and every row of V stays a combination of the d + k Gaussian vectors that the
columns of U and the rows of V are at the start. The coefficients follow the same recursion as a network of width
d + k that begins with ``U = [su 1; 0]`` and ``V = [0, sv 1]``. That is exact for any loss, batch and number of steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LinearNetwork:
    """Weights of ``f(x) = V (U x + b)``, or their coefficients at infinite width.

    Attributes:
        U: (n, d) first matrix, over the root of the width.
        V: (k, n) readout, times the root of the width.
        b: (n,) bias of the hidden layer, over the root of the width.

    Source: "Feature Learning in Infinite-Width Neural Networks", Theorem D.1.

    Example:
        >>> import torch
        >>> net = infinite_width(1, 1)
        >>> for _ in range(2):
        ...     net = net.step(torch.ones(1, 1), net(torch.ones(1, 1)) - 1, lr=0.5)
        >>> net(torch.ones(1, 1))
        tensor([[1.]])
    """

    U: Tensor
    V: Tensor
    b: Tensor

    def __post_init__(self) -> None:
        n = self.U.shape[0]
        if self.U.ndim != 2 or self.V.ndim != 2 or self.V.shape[1] != n or self.b.shape != (n,):
            shapes = tuple(self.U.shape), tuple(self.V.shape), tuple(self.b.shape)
            raise ValueError(
                f"U, V and b must be (n, d), (k, n) and (n,), got {shapes[0]}, {shapes[1]} and {shapes[2]}"
            )

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """Return the outputs (B, k) of inputs (B, d)."""
        return (x @ self.U.T + self.b) @ self.V.T

    @torch.no_grad()
    def step(
        self,
        x: Tensor,
        chi: Tensor,
        lr: float | tuple[float, float],
        *,
        alpha: float = 0.0,
        clip: float = math.inf,
        decay: float = 0.0,
    ) -> LinearNetwork:
        """Return the network after one step of gradient descent.

        Args:
            x: (B, d) inputs.
            chi: (B, k) derivatives of the loss with respect to the outputs, divided by the batch size for a mean.
            lr: learning rate, or those of U and V.
            alpha: multiplier of the bias, which is trained at ``alpha^2 lr``; 0 leaves the bias alone.
            clip: length of the whole gradient above which it is scaled down to this length.
            decay: weight decay; each weight shrinks by the part ``lr decay``.

        Raises:
            ValueError: chi is not (B, k).

        Source: Algorithms 2 and 3, where the length of the gradient lacks a root.
        """
        if chi.shape != (len(x), len(self.V)):
            raise ValueError(f"chi must be {(len(x), len(self.V))}, one row for each input, got {tuple(chi.shape)}")
        lr_u, lr_v = lr if isinstance(lr, tuple) else (lr, lr)
        hidden = x @ self.U.T + self.b  # (B, n)
        dU = -self.V.T @ chi.T @ x  # (n, d)
        dV = -chi.T @ hidden  # (k, n)
        db = -alpha * (chi @ self.V).sum(0)  # (n,), for beta with b = alpha beta
        length = torch.sqrt(dU.square().sum() + dV.square().sum() + db.square().sum())
        rho = min(1.0, clip / length.item()) if length > 0 else 1.0
        return LinearNetwork(
            self.U + lr_u * (rho * dU - decay * self.U),
            self.V + lr_v * (rho * dV - decay * self.V),
            self.b + lr_u * (rho * alpha * db - decay * self.b),
        )


def infinite_width(
    d: int, k: int, *, su: float = 1.0, sv: float = 1.0, dtype: torch.dtype | None = None
) -> LinearNetwork:
    """Return the initial coefficients of an infinitely wide network.

    Args:
        d, k: number of inputs and outputs.
        su, sv: standard deviations of the entries of U and V, times the root of the width.
        dtype: of the weights.

    Returns:
        A network of width d + k: ``U = [su 1; 0]``, ``V = [0, sv 1]``, ``b = 0``.

    Raises:
        ValueError: sizes below 1.

    Example:
        >>> infinite_width(1, 1).V
        tensor([[0., 1.]])
    """
    check_sizes(d=d, k=k)
    U, V = torch.zeros(d + k, d, dtype=dtype), torch.zeros(k, d + k, dtype=dtype)
    U[:d], V[:, d:] = su * torch.eye(d, dtype=dtype), sv * torch.eye(k, dtype=dtype)
    return LinearNetwork(U, V, torch.zeros(d + k, dtype=dtype))


def finite_width(
    n: int,
    d: int,
    k: int,
    *,
    su: float = 1.0,
    sv: float = 1.0,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
) -> LinearNetwork:
    """Return a network of width n that is drawn at random: entries ``N(0, su^2/n)`` and ``N(0, sv^2/n)``.

    Raises:
        ValueError: sizes below 1.
    """
    check_sizes(n=n, d=d, k=k)
    U = torch.randn(n, d, generator=generator, dtype=dtype) * su / math.sqrt(n)
    V = torch.randn(k, n, generator=generator, dtype=dtype) * sv / math.sqrt(n)
    return LinearNetwork(U, V, torch.zeros(n, dtype=dtype))


def check_sizes(**sizes: int) -> None:
    """Raise a ValueError that names the first size below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
