"""Rules of residual nets against the tables of CompleteP and depth-muP."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spectral_monitor.scaling import COMPLETE_P, DEPTH_MUP, FSC


class Blocks(nn.Module):
    """A residual net of two matrices a branch, with norms."""

    def __init__(self, width, blocks):
        super().__init__()
        self.tokens, self.first_norm = nn.Embedding(50, width), nn.LayerNorm(width)
        self.h = nn.ModuleList(self.block(width) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 50)

    @staticmethod
    def block(width):
        return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))


def groups_by_name(net, p, optimizer="adam", **given):
    found = p.param_groups(net, 1.0, optimizer, **given)
    return {name: group for group in found for name in group["parameter_names"]}


@pytest.mark.parametrize(("p", "alpha"), [(COMPLETE_P, 1.0), (DEPTH_MUP, 0.5)], ids=["CompleteP", "depth-muP"])
def test_from_one_model_to_a_wider_and_deeper_one(p, alpha):
    """As CompleteP's Table 1 prints it, of m_N times the width and m_L times the depth.

    Its readout has a forward multiplier of 1/m_N, which here is in its weights. So their rate is 1/m_N, their decay m_N
    and their eps what it was. Rates times decays do not change with the depth.
    """
    given = {"weight_decay": 0.1, "eps": 1e-8}
    small, large = groups_by_name(Blocks(8, 2), p, **given), groups_by_name(Blocks(32, 12), p, **given)
    m_n, m_l = 4, 6
    slower = m_l ** (alpha - 1)
    expected = {  # lr, weight_decay, eps
        "tokens.weight": (1, 1, 1 / m_n),
        "first_norm.weight": (1, 1, 1 / m_n),
        "h.0.0.weight": (slower, 1 / slower, m_l**-alpha / m_n),
        "h.0.1.weight": (slower / m_n, m_n / slower, m_l**-alpha / m_n),
        "h.0.1.bias": (slower, 1 / slower, m_l**-alpha / m_n),
        "h.1.3.weight": (slower / m_n, m_n / slower, m_l**-alpha / m_n),
        "norm.bias": (1, 1, 1 / m_n),
        "head.weight": (1 / m_n, m_n, 1),
        "head.bias": (1, 1, 1),
    }
    for name, factors in expected.items():
        found = [large[name][key] / small[name][key] for key in ("lr", "weight_decay", "eps")]
        assert found == pytest.approx(factors), name
    assert p.branch_multiplier(12) / p.branch_multiplier(2) == pytest.approx(m_l**-alpha)
    names = [group["name"] for group in p.param_groups(Blocks(8, 2), 1.0, "adam", **given)]
    assert len(set(names)) == len(names)  # else Lightning's LearningRateMonitor refuses them


def test_depth_of_branches_is_the_number_of_hidden_matrices():
    net = Blocks(8, 3)
    assert groups_by_name(net, COMPLETE_P, "sgd")["h.0.1.weight"]["lr"] == pytest.approx(6 * 32 / 8)
    assert groups_by_name(net, COMPLETE_P, "sgd", depth=3)["h.0.1.weight"]["lr"] == pytest.approx(3 * 32 / 8)
    assert groups_by_name(net, FSC, "sgd")["h.0.1.weight"]["lr"] == pytest.approx(32 / 8 / 7**2)  # all matrices


def test_eps_goes_with_the_gradient():
    """At another width and depth gradients are as large beside eps as they were."""
    shares = []
    for width, blocks in ((16, 2), (64, 8)):
        torch.manual_seed(0)
        net = Blocks(width, blocks)
        COMPLETE_P.init_(net)
        x = torch.arange(50)
        f, beta = net.first_norm(net.tokens(x)), COMPLETE_P.branch_multiplier(blocks)
        for block in net.h:
            f = f + beta * block(f)
        nn.functional.cross_entropy(net.head(net.norm(f)), x % 7).backward()
        groups = groups_by_name(net, COMPLETE_P, eps=1.0)
        names = ("tokens.weight", "h.0.1.weight", "h.0.1.bias", "h.1.3.weight", "norm.bias", "head.weight")
        grads = dict(net.named_parameters())
        shares.append([grads[n].grad.square().mean().sqrt().item() / groups[n]["eps"] for n in names])
    assert shares[0] == pytest.approx(shares[1], rel=0.5)
