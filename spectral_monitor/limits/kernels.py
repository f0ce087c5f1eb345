"""Kernels of infinitely wide networks whose features stand still: NNGP and NTK of linear and ReLU perceptrons."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor


@torch.no_grad()
def relu_kernels(
    x: Tensor, z: Tensor, *, depth: int = 1, su: float = 1.0, sv: float = 1.0, sb: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the NNGP and the NTK of a ReLU perceptron between two sets of inputs.

    Biases are drawn but not trained. Entries of the first matrix are ``N(0, su^2)``, those of every later one ``N(0,
    sv^2)`` over the root of the width; every hidden layer's bias is ``N(0, sb^2)``. Outside the root all matrices are
    trained at rate 1.

    Args:
        x: (B, d) inputs.
        z: (C, d) inputs.
        depth: number of hidden layers.
        su, sv, sb: standard deviations.

    Returns:
        Two (B, C) matrices; the NNGP is the covariance of outputs at the start.

    Raises:
        ValueError: not (rows, d) both, or a depth below 1.

    Source: "Feature Learning in Infinite-Width Neural Networks", Section D.1.2; arc-cosine kernels of Cho and Saul.

    Example:
        >>> import torch
        >>> nngp, ntk = relu_kernels(torch.ones(1, 1), torch.ones(1, 1))
        >>> nngp, ntk
        (tensor([[0.5000]]), tensor([[1.]]))
    """
    if x.ndim != 2 or z.ndim != 2 or x.shape[1] != z.shape[1]:
        raise ValueError(f"x and z must be (rows, d) with one d, got {tuple(x.shape)} and {tuple(z.shape)}")
    if depth < 1:
        raise ValueError(f"depth must be at least 1, got {depth}")
    # Covariances of the first hidden layer's inputs, and the tangent kernel of these.
    K = su**2 * x @ z.T + sb**2
    v, w = su**2 * x.square().sum(1) + sb**2, su**2 * z.square().sum(1) + sb**2
    tangent = x @ z.T
    for layer in range(depth):
        scale = (v[:, None] * w[None]).sqrt()
        c = torch.where(scale > 0, K / scale, torch.zeros_like(K)).clamp(-1, 1)
        angle = math.pi - torch.acos(c)
        features = scale * ((1 - c.square()).sqrt() + c * angle) / (2 * math.pi)  # E[relu relu']
        slopes = angle / (2 * math.pi)  # E[step step']
        tangent = features + sv**2 * tangent * slopes
        bias = sb**2 if layer < depth - 1 else 0.0
        K = sv**2 * features + bias
        v, w = sv**2 * v / 2 + bias, sv**2 * w / 2 + bias
    return K, tangent


class KernelMachine:
    """A function ``f(x) = sum_j q_j K(z_j, x)``, trained by SGD in the space of functions.

    Args:
        kernel: ``"linear"``, ``"nngp"`` or ``"ntk"``.
        outputs: k.
        settings: of :func:`relu_kernels`.

    Raises:
        ValueError: another kernel.

    Source: "Feature Learning in Infinite-Width Neural Networks", Section D.1.2.

    Example:
        >>> import torch
        >>> machine = KernelMachine("linear", 1)
        >>> machine.push(torch.ones(1, 2), torch.full((1, 1), -0.5))
        >>> machine(torch.ones(1, 2))
        tensor([[-1.]])
    """

    def __init__(self, kernel: Literal["linear", "nngp", "ntk"], outputs: int, **settings: float) -> None:
        if kernel not in ("linear", "nngp", "ntk"):
            raise ValueError(f"kernel must be 'linear', 'nngp' or 'ntk', got {kernel!r}")
        self.kernel, self.outputs, self.depth = kernel, outputs, int(settings.pop("depth", 1))
        self.settings = settings
        self._points: list[tuple[Tensor, Tensor]] = []

    def between(self, x: Tensor, z: Tensor) -> Tensor:
        """Return the kernel (B, C) between inputs (B, d) and (C, d)."""
        if self.kernel == "linear":
            return x @ z.T
        nngp, ntk = relu_kernels(x, z, depth=self.depth, **self.settings)
        return nngp if self.kernel == "nngp" else ntk

    def __call__(self, x: Tensor) -> Tensor:
        """Return the outputs (B, k) of inputs (B, d)."""
        if not self._points:
            return x.new_zeros(len(x), self.outputs)
        z, q = (torch.cat(parts) for parts in zip(*self._points, strict=True))
        return self.between(x, z) @ q

    def push(self, x: Tensor, q: Tensor) -> None:
        """Add points (B, d) with coefficients (B, k); a step of SGD adds ``-lr`` times the loss's derivatives.

        Raises:
            ValueError: coefficients of another shape.
        """
        if q.shape != (len(x), self.outputs):
            raise ValueError(f"q must be {(len(x), self.outputs)}, got {tuple(q.shape)}")
        self._points.append((x, q))

    def pop(self) -> None:
        """Take back the points that were added last, as after the adaptation to a task."""
        self._points.pop()
