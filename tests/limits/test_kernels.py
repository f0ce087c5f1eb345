"""Kernels against Monte Carlo of finite networks, against quadrature-free recursion, and against gradient descent."""

from __future__ import annotations

import math

import pytest
import torch

from spectral_monitor.limits import KernelMachine, relu_kernels, softmax_derivative, square_derivative

SU, SV, SB = 0.8, 1.3, 0.4


def points():
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(size, 3, generator=generator, dtype=torch.float64) for size in (2, 3))


def finite(n, depth, x, z, generator):
    """NNGP and NTK of one network by autograd; the readout's expectation is taken over its draw."""

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    Ws = [normal(n, 3) * SU, *[normal(n, n) * SV for _ in range(depth - 1)]]
    biases, V = [normal(n) * SB for _ in Ws], normal(1, n) * SV
    for W in (*Ws, V):
        W.requires_grad_()

    def features(u):
        h = torch.relu(Ws[0] @ u + biases[0])
        for W, b in zip(Ws[1:], biases[1:], strict=True):
            h = torch.relu(W @ h / math.sqrt(n) + b)
        return h

    def gradient(u):
        grads = torch.autograd.grad((V @ features(u) / math.sqrt(n)).sum(), [*Ws, V])
        return torch.cat([g.flatten() for g in grads])

    hx, hz = (torch.stack([features(u) for u in part]).detach() for part in (x, z))
    gx, gz = (torch.stack([gradient(u) for u in part]) for part in (x, z))
    return SV**2 * hx @ hz.T / n, gx @ gz.T


@pytest.mark.parametrize(("depth", "n"), [(1, 4000), (3, 400)])
def test_kernels_are_those_of_wide_networks(depth, n):
    x, z = points()
    generator = torch.Generator().manual_seed(1)
    draws = [finite(n, depth, x, z, generator) for _ in range(24)]
    for exact, found in zip(
        relu_kernels(x, z, depth=depth, su=SU, sv=SV, sb=SB), zip(*draws, strict=True), strict=True
    ):
        stack = torch.stack(found)
        error = stack.std(0) / math.sqrt(len(stack))
        assert ((stack.mean(0) - exact).abs() < 3 * error + 1 / n).all()


def test_deep_kernels_are_shallow_ones_layer_by_layer():
    """On the points themselves: inputs whose inner products are a layer's covariances go through one layer."""
    x, z = points()
    both = torch.cat([x, z])
    whole = relu_kernels(both, both, depth=3, su=SU, sv=SV)[0]
    for _ in range(3):
        K = relu_kernels(both, both, su=SU, sv=SV)[0]
        values, vectors = torch.linalg.eigh(K)
        both = vectors * values.clamp(min=0).sqrt() / SU  # su^2 both both^T = K
    torch.testing.assert_close(K, whole, rtol=0, atol=1e-10)


def test_the_linear_machine_is_gradient_descent():
    x, z = points()
    y = torch.ones(2, 2, dtype=torch.float64)
    machine, W = KernelMachine("linear", 2), torch.zeros(3, 2, dtype=torch.float64)
    for _ in range(5):
        chi = machine(x) - y
        machine.push(x, -0.1 * chi)
        W = W - 0.1 * x.T @ (x @ W - y)
    torch.testing.assert_close(machine(z), z @ W)
    before = machine(z)
    machine.push(x, y)
    assert not torch.equal(machine(z), before)
    machine.pop()
    assert torch.equal(machine(z), before)


@pytest.mark.parametrize("kernel", ["nngp", "ntk"])
def test_training_is_the_linear_model_of_the_gram_matrix(kernel):
    """``f <- f - lr K chi`` on the batch; elsewhere by the same coefficients."""
    x, z = points()
    y = torch.tensor([0, 1])
    machine = KernelMachine(kernel, 2, su=SU, sv=SV, sb=SB, depth=2)
    f = {"x": torch.zeros(2, 2, dtype=torch.float64), "z": torch.zeros(3, 2, dtype=torch.float64)}
    for _ in range(4):
        machine.step(x, y, softmax_derivative, lr=0.7)
        logits = f["x"].clone().requires_grad_()
        (chi,) = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, y), logits)
        for name, inputs in (("x", x), ("z", z)):
            f[name] = f[name] - 0.7 * machine.between(inputs, x) @ chi
    torch.testing.assert_close(machine(x), f["x"])
    torch.testing.assert_close(machine(z), f["z"])
    assert f["z"].abs().max() > 0.05


@pytest.mark.parametrize("clip", [math.inf, 0.05])
def test_meta_learning_is_first_order_maml_of_the_linear_model(clip):
    """Against ``f = W x`` with weights, gradients by autograd and torch's clipping."""
    generator = torch.Generator().manual_seed(3)
    machine, W = KernelMachine("linear", 3), torch.zeros(3, 4, dtype=torch.float64)
    loss = torch.nn.functional.cross_entropy
    for _ in range(3):
        tasks, total = [], torch.zeros_like(W)
        for _ in range(2):
            x, test = (torch.randn(5, 4, generator=generator, dtype=torch.float64) for _ in range(2))
            y, target = (torch.randint(3, (5,), generator=generator) for _ in range(2))
            tasks.append((x, y, test, target))
            start = W.clone().requires_grad_()
            (g,) = torch.autograd.grad(loss(x @ start.T, y), start)
            moved = (W - 0.4 * g).requires_grad_()
            total += torch.autograd.grad(loss(test @ moved.T, target), moved)[0]
        W = W - 0.3 * total * min(1.0, clip / total.norm().item())
        machine.meta_step(tasks, softmax_derivative, adapt_lr=0.4, lr=0.3, clip=clip)
        if clip < math.inf:
            assert total.norm() > clip
    torch.testing.assert_close(machine(test), test @ W.T)
    before = machine(test)
    assert not torch.equal(machine.adapted(x, y, softmax_derivative, lr=0.4, steps=20)(test), before)
    assert torch.equal(machine(test), before)


def test_a_kernel_may_be_a_function():
    """Of indices into a Gram matrix, for instance."""
    x, _ = points()
    gram = relu_kernels(x, x)[1]
    indices = KernelMachine(lambda i, j: gram[i][:, j], 1)
    plain = KernelMachine("ntk", 1)
    every = torch.arange(2)
    for _ in range(2):
        indices.step(every, torch.ones(2, 1), square_derivative, lr=0.1)
        plain.step(x, torch.ones(2, 1), square_derivative, lr=0.1)
    torch.testing.assert_close(indices(every), plain(x))


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"got \(2, 3\) and \(2, 4\)"):
        relu_kernels(torch.ones(2, 3), torch.ones(2, 4))
    with pytest.raises(ValueError, match="depth must be at least 1, got 0"):
        relu_kernels(torch.ones(2, 3), torch.ones(2, 3), depth=0)
    with pytest.raises(ValueError, match="kernel must be 'linear', 'nngp', 'ntk' or a function, got 'rbf'"):
        KernelMachine("rbf", 1)
