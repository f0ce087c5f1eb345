"""Moments of the feature-to-backward kernel, against the kernel written out in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.autograd.graph import get_gradient_edge

import spectral_monitor.functional as F
from spectral_monitor.functional.kernels import signs
from tests.functional.test_kernels import perceptron

RATES = (7.0, 0.3, 0.05, 0.11)


def basis(*shapes):
    """The columns of sqrt(m) times the identity, in parts: with these moments are exact."""
    sizes = [math.prod(shape) for shape in shapes]
    rows = math.sqrt(sum(sizes)) * torch.eye(sum(sizes), dtype=torch.float64)
    return [[part.view(shape) for part, shape in zip(row.split(sizes), shapes, strict=True)] for row in rows]


def moments(K):
    return np.trace(K) / len(K), np.trace(K @ K) / len(K)


def jacobian(function, w):
    """By central differences: exact for what is linear, and to 1e-8 else."""
    columns = []
    for k in range(w.size):
        e = np.zeros(w.size)
        e[k] = 1e-5
        columns.append((function(w + e.reshape(w.shape)) - function(w - e.reshape(w.shape))) / 2e-5)
    return np.stack([c.ravel() for c in columns], 1)


def test_of_a_relu_perceptron_it_is_the_form_of_the_paper():
    """K~_v = sum over l > v of lr_l |b_l|^2 J_l^T J_l, written out in numpy; and Euler's identity db/dt = -K~ f."""
    weights = perceptron([5, 7, 6, 8, 3], seed=3)
    x, y = torch.randn(5, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    W = [w.detach().numpy() for w in weights]
    f = [W[0] @ x.numpy()]
    for matrix in W[1:]:
        f.append(matrix @ np.maximum(f[-1], 0))
    b = [y.numpy()]
    for k in (2, 1, 0):
        b.insert(0, (f[k] > 0) * (W[k + 1].T @ b[0]))
    K = np.zeros((7, 7))
    J = np.diag((f[0] > 0).astype(float))  # the inputs of the matrix behind, by f_0
    for k in (1, 2, 3):
        K += RATES[k] * (b[k] @ b[k]) * J.T @ J
        J = np.diag((f[k] > 0).astype(float)) @ W[k] @ J
    h = weights[0] @ x
    out = h
    for w in weights[1:]:
        out = w @ out.relu()
    found = F.dual_bfk_moments((out * y).sum(), [h], weights, RATES, basis((7,)))
    np.testing.assert_allclose([value.item() for value in found], moments(K), rtol=1e-10)

    def gradient(rest):
        """b at the features that there are, for other weights behind."""
        z, masks = f[0], []
        for matrix in rest:
            masks.append(z > 0)
            z = matrix @ np.maximum(z, 0)
        back = y.numpy()
        for matrix, mask in zip(rest[::-1], masks[::-1], strict=True):
            back = mask * (matrix.T @ back)
        return back

    inputs = [np.maximum(f[k], 0) for k in range(3)]
    t = 1e-7
    moved = [W[k] - t * RATES[k] * np.outer(b[k], inputs[k - 1]) for k in (1, 2, 3)]
    speed = (gradient(moved) - gradient(W[1:])) / t
    np.testing.assert_allclose(speed, -K @ f[0], rtol=1e-5, atol=1e-5 * np.abs(speed).max())


class Net:
    """Tanh, biases, a loss that is not linear, several rows, a layer that feeds two others."""

    def __init__(self):
        torch.manual_seed(4)
        shapes = {"A": (4, 3), "B": (5, 4), "c": (5,), "D": (2, 5), "E": (2, 4)}
        self.w = {name: torch.randn(*s, dtype=torch.float64, requires_grad=True) for name, s in shapes.items()}
        self.x, self.y = torch.randn(2, 3, dtype=torch.float64), torch.tensor([0, 1])

    def first(self):
        return self.x @ self.w["A"].T

    def loss(self, h, w):
        out = (h.tanh() @ w["B"].T + w["c"]).tanh() @ w["D"].T + h @ w["E"].T
        return torch.nn.functional.cross_entropy(out, self.y)


def written_out(net, behind, rates):
    """The sum of lr B B^T, B by differences of b at fixed features."""
    h = net.first().detach()

    def b(name, value):
        w = {key: p.detach() for key, p in net.w.items()} | {name: torch.as_tensor(value)}
        leaf = h.clone().requires_grad_()
        return torch.autograd.grad(net.loss(leaf, w), leaf)[0].numpy()

    K = 0
    for name, rate in zip(behind, rates, strict=True):
        B = jacobian(lambda value, name=name: b(name, value), net.w[name].detach().numpy())
        K = K + rate * B @ B.T
    return K


@pytest.mark.parametrize("places", ["tensors", "edges"])
def test_of_any_network_it_is_the_sum_over_weights_behind(places):
    net = Net()
    K = written_out(net, ["B", "c", "D", "E"], (0.3, 0.05, 0.11, 0.2))
    h = net.first()
    loss = net.loss(h, net.w)
    at = [h] if places == "tensors" else [get_gradient_edge(h)]
    rates = (7.0, 0.3, 0.05, 0.11, 0.2)  # that of A, which leads to the features, counts for nothing
    found = F.dual_bfk_moments(loss, at, list(net.w.values()), rates, basis((2, 4)))
    np.testing.assert_allclose([value.item() for value in found], moments(K), rtol=1e-6)
    assert all(p.grad is None for p in net.w.values())
    again = F.dual_bfk_moments(loss, at, list(net.w.values()), rates, basis((2, 4)))
    assert [value.item() for value in again] == [value.item() for value in found]


def test_parameters_that_the_loss_does_not_use_add_nothing():
    """Nor do those whose gradients are constants."""
    net = Net()
    h = net.first()
    unused, constant = (torch.ones(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    parameters, rates = [unused, constant, *net.w.values()], (2.0, 3.0, 7.0, 0.3, 0.05, 0.11, 0.2)
    alone = F.dual_bfk_moments(net.loss(h, net.w), [h], parameters[2:], rates[2:], basis((2, 4)))
    found = F.dual_bfk_moments(net.loss(h, net.w) + constant.sum(), [h], parameters, rates, basis((2, 4)))
    assert [value.item() for value in found] == [value.item() for value in alone]


def test_rates_of_zero_add_nothing():
    net = Net()
    K = written_out(net, ["D"], (0.4,))
    h = net.first()
    rates = (7.0, 0.0, 0.0, 0.4, 0.0)
    found = F.dual_bfk_moments(net.loss(h, net.w), [h], list(net.w.values()), rates, basis((2, 4)))
    np.testing.assert_allclose([value.item() for value in found], moments(K), rtol=1e-6)


def test_random_signs_are_within_their_standard_error():
    net = Net()
    K = written_out(net, ["B", "c", "D", "E"], (0.3, 0.05, 0.11, 0.2))
    h, generator = net.first(), torch.Generator().manual_seed(5)
    probes = [[signs((2, 4), generator)] for _ in range(300)]
    rates = (7.0, 0.3, 0.05, 0.11, 0.2)
    first, second = F.dual_bfk_moments(net.loss(h, net.w), [h], list(net.w.values()), rates, probes)
    Z = torch.stack([z.flatten() for (z,) in probes]).double().numpy()
    assert first.item() == pytest.approx(np.mean(np.sum(Z * (Z @ K), 1)) / len(K), rel=1e-6)
    assert second.item() == pytest.approx(np.mean(np.sum((Z @ K) ** 2, 1)) / len(K), rel=1e-6)
    assert first.item() == pytest.approx(moments(K)[0], rel=0.2)


def test_behind_the_output_of_a_linear_loss_there_is_nothing():
    W = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    out = W @ torch.ones(3, dtype=torch.float64)
    found = F.dual_bfk_moments(out.sum(), [out], [W], [1.0], basis((2,)))
    assert [value.item() for value in found] == [0, 0]
    assert math.isnan(F.bfk_ratio(*found).item())


class Silent(torch.autograd.Function):
    """Its backward pass cannot be differentiated by the gradient it is given, and does not say so."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 0 * g + 2 * x * g.detach()


def test_what_drops_out_of_second_derivatives_is_seen():
    W, V = (torch.randn(3, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    h = W @ torch.ones(3, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        F.dual_bfk_moments(Silent.apply(V @ Silent.apply(h)).sum(), [h], [W, V], [1.0, 1.0], basis((3,)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"probes": []}, "0 probes"),
        ({"probes": [[torch.ones(2)]]}, r"probes must be like the outputs \[\(2, 4\)\]"),
        ({"rates": [1.0]}, "1 rates for 5 parameters"),
        ({"rates": [1.0] * 6}, "6 rates for 5 parameters"),
        ({"outputs": "apart"}, "the loss must depend on all of the 1 outputs"),
    ],
    ids=["no probes", "shapes", "few rates", "many rates", "apart"],
)
def test_misuse(change, said):
    net = Net()
    h = net.first()
    if change.get("outputs") == "apart":
        change = {"outputs": [torch.ones(3, requires_grad=True) * 2]}
    right = {"outputs": [h], "parameters": list(net.w.values()), "rates": [1.0] * 5, "probes": basis((2, 4))}
    with pytest.raises(ValueError, match=said):
        F.dual_bfk_moments(net.loss(h, net.w), **{**right, **change})


@pytest.mark.parametrize("autocast", [False, True])
def test_kernels_are_those_of_full_precision_under_autocast_too(autocast):
    def found(dtype, around):
        weights = [w.detach().to(dtype).requires_grad_() for w in perceptron([5, 7, 6, 3], seed=3)]
        x = torch.ones(4, 5, dtype=dtype)
        h = x @ weights[0].T
        out = torch.tanh(torch.tanh(h) @ weights[1].T) @ weights[2].T
        probes = [[part.to(dtype) for part in probe] for probe in basis((4, 7))]
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            dual = F.dual_bfk_moments(out.square().sum(), [h], weights, RATES[:3], probes)
            return [float(value) for value in (*dual, *F.bfk_moments([h], weights[:1], [0.3], probes))]

    assert found(torch.float32, autocast) == pytest.approx(found(torch.float64, False), rel=1e-5)
