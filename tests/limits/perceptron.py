"""A perceptron of finite width as it is applied, with one input, trained by autograd: the oracle of populations."""

from __future__ import annotations

import math

import torch


def losses(n, depth, phi, lr, xs, ys, seed):
    """Square losses over 2 before each step, one example a step."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    U, V = normal(n, 1), normal(1, n) / n
    Ws = [normal(n, n) / math.sqrt(n) for _ in range(depth - 1)]
    weights, rates = [U, *Ws, V], [lr * n, *[lr] * len(Ws), lr / n]
    for W in weights:
        W.requires_grad_()
    found = []
    for x, y in zip(xs, ys, strict=True):
        h = torch.tensor([x])
        for W in weights[:-1]:
            h = phi(W @ h)
        loss = (V @ h - y).square().sum() / 2
        found.append(loss.item())
        for W, rate, g in zip(weights, rates, torch.autograd.grad(loss, weights), strict=True):
            W.data -= rate * g
    return found
