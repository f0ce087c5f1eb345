"""Kernels of infinitely wide networks whose features stand still: NNGP and NTK of linear and ReLU perceptrons."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
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
        c = torch.where(scale > 0, K / scale, 0.0).clamp(-1, 1)
        angle = math.pi - torch.acos(c)
        features = scale * ((1 - c.square()).sqrt() + c * angle) / (2 * math.pi)  # E[relu relu']
        slopes = angle / (2 * math.pi)  # E[step step']
        tangent = features + sv**2 * tangent * slopes
        bias = sb**2 if layer < depth - 1 else 0.0
        K = sv**2 * features + bias
        v, w = sv**2 * v / 2 + bias, sv**2 * w / 2 + bias
    return K, tangent


Kernel = Callable[[Tensor, Tensor], Tensor]
Derivative = Callable[[Tensor, Tensor], Tensor]
Task = tuple[Tensor, Tensor, Tensor, Tensor]


def softmax_derivative(f: Tensor, y: Tensor) -> Tensor:
    """Return the derivatives (B, k) of the mean cross entropy with respect to logits (B, k), for labels (B,)."""
    target = torch.nn.functional.one_hot(y, f.shape[1])
    return (f.softmax(1) - target) / len(f)


def square_derivative(f: Tensor, y: Tensor) -> Tensor:
    """Return the derivatives (B, k) of ``|f - y|^2 / 2``, the mean over inputs, with respect to outputs (B, k)."""
    return (f - y) / len(f)


class KernelMachine:
    """A function ``f(x) = sum_j q_j K(z_j, x)``, trained by SGD in the space of functions.

    Args:
        kernel: ``"linear"``, ``"nngp"``, ``"ntk"``, or a function of (B, ...) and (C, ...) that returns (B, C).
        outputs: k.
        settings: of :func:`relu_kernels`.

    Raises:
        ValueError: another kernel.

    Source: "Feature Learning in Infinite-Width Neural Networks", Section D.1.2 and Algorithm 4.

    Example:
        >>> import torch
        >>> machine = KernelMachine("linear", 1)
        >>> for _ in range(50):
        ...     machine.step(torch.ones(1, 2), torch.ones(1, 1), square_derivative, lr=0.1)
        >>> machine(torch.ones(1, 2))
        tensor([[1.0000]])
    """

    def __init__(self, kernel: Literal["linear", "nngp", "ntk"] | Kernel, outputs: int, **settings: float) -> None:
        if not callable(kernel) and kernel not in ("linear", "nngp", "ntk"):
            raise ValueError(f"kernel must be 'linear', 'nngp', 'ntk' or a function, got {kernel!r}")
        self.kernel, self.outputs, self.depth = kernel, outputs, int(settings.pop("depth", 1))
        self.settings = settings
        self._points: list[tuple[Tensor, Tensor]] = []

    def between(self, x: Tensor, z: Tensor) -> Tensor:
        """Return the kernel (B, C) between inputs (B, d) and (C, d)."""
        if callable(self.kernel):
            return self.kernel(x, z)
        if self.kernel == "linear":
            return x @ z.T
        nngp, ntk = relu_kernels(x, z, depth=self.depth, **self.settings)
        return nngp if self.kernel == "nngp" else ntk

    def __call__(self, x: Tensor) -> Tensor:
        """Return the outputs (B, k) of inputs (B, d)."""
        if not self._points:
            return self.between(x, x[:1]).new_zeros(len(x), self.outputs)
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
        """Remove the points that were added last, as after the adaptation to a task."""
        self._points.pop()

    def step(self, x: Tensor, y: Tensor, derivative: Derivative, *, lr: float) -> None:
        """Take a step of SGD on inputs (B, d) and targets (B, ...).

        Args:
            x, y: a batch.
            derivative: turns outputs (B, k) and targets into the derivatives of the loss (B, k), divided by the batch
                size for a mean, such as :func:`softmax_derivative`.
            lr: learning rate.
        """
        self.push(x, -lr * derivative(self(x), y))

    def adapted(self, x: Tensor, y: Tensor, derivative: Derivative, *, lr: float, steps: int = 1) -> KernelMachine:
        """Return a machine that took steps of SGD on one batch; this one stays as it is."""
        other = copy.copy(self)
        other._points = list(self._points)
        for _ in range(steps):
            other.step(x, y, derivative, lr=lr)
        return other

    def meta_step(
        self, tasks: Sequence[Task], derivative: Derivative, *, adapt_lr: float, lr: float, clip: float = math.inf
    ) -> None:
        """Take a step of first-order MAML: gradients after one step of adaptation, applied before it.

        Args:
            tasks: each (training inputs, their targets, test inputs, their targets).
            derivative: as for :meth:`step`.
            adapt_lr: learning rate of the adaptation.
            lr: learning rate of the step.
            clip: length of the sum of the tasks' gradients above which it is scaled down to this length.

        Source: Algorithm 4, whose length of the gradient lacks a root and whose adaptation lacks its learning rate.
        """
        # Outputs before the adaptation, of the training and the test inputs of all tasks at once.
        train, test = (torch.cat([task[part] for task in tasks]) for part in (0, 2))
        outputs = self(train).split([len(task[0]) for task in tasks])
        test_outputs = self(test).split([len(task[2]) for task in tasks])
        chis = []
        for (x, y, x_test, target), f, f_test in zip(tasks, outputs, test_outputs, strict=True):
            adapted = f_test - adapt_lr * self.between(x_test, x) @ derivative(f, y)
            chis.append(derivative(adapted, target))
        chi = torch.cat(chis)
        # The gradient is sum_i chi_i (features of i), whose inner products are the kernel.
        length = (chi * (self.between(test, test) @ chi)).sum().clamp(min=0).sqrt().item()
        self.push(test, -lr * min(1.0, clip / length if length > 0 else 1.0) * chi)
