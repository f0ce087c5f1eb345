"""The exact limit of linear networks with one hidden layer, against wide networks and scalar formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spectral_monitor.limits import LinearNetwork, finite_width, infinite_width

WIDTHS = (64, 256, 1024, 4096, 16384)
D, K, BATCH, STEPS = 10, 3, 16, 12


def outputs(network, *, clip=0.3, decay=0.1):
    """Outputs on fixed inputs after clipped, decayed steps of logistic regression on fixed batches."""
    generator = torch.Generator().manual_seed(1)
    test = torch.randn(50, D, generator=generator, dtype=torch.float64)
    for _ in range(STEPS):
        x = torch.randn(BATCH, D, generator=generator, dtype=torch.float64)
        y = torch.randint(K, (BATCH,), generator=generator)
        chi = (network(x).softmax(1) - torch.nn.functional.one_hot(y, K)) / BATCH
        network = network.step(x, chi, 0.5, alpha=1.0, clip=clip, decay=decay)
    return network(test)


def distance(n, seed):
    limit = outputs(infinite_width(D, K, dtype=torch.float64))
    generator = torch.Generator().manual_seed(seed)
    wide = outputs(finite_width(n, D, K, generator=generator, dtype=torch.float64))
    return ((wide - limit).norm() / limit.norm()).item()


def test_one_input_and_output_follow_the_scalar_recursion():
    """Corollary 6.2, whose four numbers are the coefficients where d = k = 1."""
    A, B, C, D_ = 1.0, 0.0, 0.0, 1.0
    network = infinite_width(1, 1, dtype=torch.float64)
    for x, y in [(1.0, 1.0), (-1.0, 0.5), (0.3, -2.0), (2.0, 1.0)]:
        f = (A * C + B * D_) * x
        one = torch.tensor([[x]], dtype=torch.float64)
        assert network(one).item() == pytest.approx(f, abs=1e-12)
        chi = f - y
        A, B, C, D_ = A - 0.1 * chi * x * C, B - 0.1 * chi * x * D_, C - 0.1 * chi * x * A, D_ - 0.1 * chi * x * B
        network = network.step(one, torch.full((1, 1), chi, dtype=torch.float64), 0.1)


def test_distance_to_the_limit_falls_as_the_root_of_the_width():
    distances = [np.mean([distance(n, seed) for seed in range(4)]) for n in WIDTHS]
    slope = np.polyfit(np.log(WIDTHS), np.log(distances), 1)[0]
    assert slope == pytest.approx(-0.5, abs=0.1)
    assert distances[-1] < 0.04


def test_clipping_and_decay_change_the_limit():
    """So that the comparison with wide networks sees both."""
    limit, free = outputs(infinite_width(D, K, dtype=torch.float64)), torch.inf
    start = infinite_width(D, K, dtype=torch.float64)
    for other in (outputs(start, clip=free), outputs(start, decay=0.0)):
        assert (other - limit).norm() > 0.1 * limit.norm()


def test_a_step_is_that_of_autograd():
    generator = torch.Generator().manual_seed(0)
    net = finite_width(7, D, K, generator=generator, dtype=torch.float64)
    x, y = (torch.randn(5, size, generator=generator, dtype=torch.float64) for size in (D, K))
    weights = [part.clone().requires_grad_() for part in (net.U, net.V, net.b)]
    optimizer = torch.optim.SGD(weights, lr=0.1, weight_decay=0.0)
    loss = ((x @ weights[0].T + weights[2]) @ weights[1].T - y).square().sum() / 2
    loss.backward()
    torch.nn.utils.clip_grad_norm_(weights, 0.7, foreach=False)
    optimizer.step()
    after = net.step(x, net(x) - y, 0.1, alpha=1.0, clip=0.7)
    for got, wanted in zip((after.U, after.V, after.b), weights, strict=True):
        torch.testing.assert_close(got, wanted.detach(), rtol=1e-5, atol=1e-6)  # torch adds 1e-6 to the length


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"d must be at least 1, got 0"):
        infinite_width(0, 1)
    with pytest.raises(ValueError, match=r"U, V and b must be"):
        LinearNetwork(torch.ones(3, 2), torch.ones(1, 4), torch.ones(3))
    with pytest.raises(ValueError, match=r"chi must be \(2, 1\)"):
        infinite_width(2, 1).step(torch.ones(2, 2), torch.ones(2, 3), 0.1)
