"""Theorem 3.2 of the Feature Speed Formula: at initialisation the angle is that of the backward-to-feature kernel."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from spectral_monitor import SpectralProbe

from .residual import Network, Trunk

D, M, L, ETA = 10, 200, 50, 1e-3
NODES = (5, 10, 25, 48)


def cosines(beta, seed):
    """The measured cosine and that of the kernel at some nodes, after one step eta / (L |g|^2) of every layer."""
    generator = torch.Generator().manual_seed(seed)
    network = Network(Trunk(D, M, L, beta, NODES, generator), M, 1, generator)
    x = torch.randn(1, D, generator=generator, dtype=torch.float64) / math.sqrt(D)
    optimizer = torch.optim.SGD([{"params": [V.weight]} for V in network.trunk.V], lr=ETA)
    probe = SpectralProbe(
        network, optimizer, every_n_steps=1, quantities=["bfa_cos", "bfk_ratio"], include=["trunk.window.*"]
    )
    with probe.step():
        network(x, torch.ones(1, 1, dtype=torch.float64)).backward()
        for group in optimizer.param_groups:
            group["lr"] = ETA / (L * group["params"][0].grad.square().sum().item())
        optimizer.step()
    names = [f"trunk.window.{node}" for node in NODES]
    return [[probe.latest.value(key, name) for name in names] for key in ("bfa_cos", "bfk_ratio")]


@pytest.mark.slow
@pytest.mark.parametrize("times", [0.5, 1.0, 2.0])
def test_the_kernel_tells_the_angle(times):
    measured, predicted = np.mean([cosines(times / math.sqrt(L), seed) for seed in range(8)], axis=0)
    np.testing.assert_allclose(predicted, measured, rtol=0.05)
    assert predicted[-1] < predicted[0], "the deeper the node, the larger the angle"
