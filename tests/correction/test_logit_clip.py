"""Factors of queries and keys whose logits pass a limit, step by step; on real networks in tests/attention."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from spectral_monitor import LayerInfo, LRCorrection, Measurement, SpectralProbe
from spectral_monitor.correction.logit_clip import MIN_FACTOR, LogitClip


def block(query, key):
    return SimpleNamespace(layer=query, query=SimpleNamespace(layer=query), key=SimpleNamespace(layer=key))


def measurement(*logits):
    layers = tuple(LayerInfo(str(i), "operator", 4, 4, (4, 4)) for i in range(len(logits)))
    values = {"attention_logit_max": torch.tensor(logits), "lr_multiplier": torch.full((len(logits),), 3.0)}
    return Measurement(1, layers, values, {})


def test_factors_fall_by_the_square_and_rise_by_two():
    """Of two blocks, the second with a projection that makes queries and keys at once."""
    clip = LogitClip(100.0, [block(0, 1), block(2, 2)])
    assert clip.update(measurement(100.0, math.nan, -5.0)) == []
    assert clip.factors == {0: 1.0, 1: 1.0, 2: 1.0}
    (change,) = clip.update(measurement(200.0, math.nan, 50.0))
    assert clip.factors == {0: 0.25, 1: 0.25, 2: 1.0}
    assert (change.layer, change.before, change.after, change.observed, change.wanted) == ("0", 3.0, 0.75, 200.0, 100.0)
    clip.update(measurement(math.nan, math.nan, 1e6))
    assert clip.factors == {0: 0.25, 1: 0.25, 2: MIN_FACTOR}, "what is not known changes nothing"
    again = LogitClip(100.0, [block(0, 1), block(2, 2)])
    again.load_state_dict(clip.state_dict())
    for before, expected in ((0.25, 0.5), (0.5, 1.0), (1.0, 1.0)):
        changes = [change for change in again.update(measurement(99.0, math.nan, 101.0)) if change.layer == "0"]
        assert again.factors[0] == again.factors[1] == expected
        assert [change.after / change.before for change in changes] == [expected / before] * (expected != before)
    assert again.factors[2] == MIN_FACTOR


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.mix, self.head = nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.mix(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize("policy", ["balance", "target"])
def test_queries_and_keys_are_slowed_by_the_factor(policy):
    found = []
    for limit in (1e6, 1e-6):
        model = Attending()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        probe = SpectralProbe(
            model, optimizer, every_n_steps=1, mode="correct", correction=LRCorrection(policy, qk_clip=limit)
        )
        torch.manual_seed(1)
        with probe.step():
            model(torch.randn(8, 5, 16)).square().mean().backward()
            optimizer.step()
        corrector = probe._supervisor._corrector
        used = corrector._swap.multipliers[model.mix.in_proj_weight]
        found.append((dict(probe.multipliers), dict(corrector.expected), used))
    (free, meant, before), (slow, less, after) = found
    assert after / before == pytest.approx(MIN_FACTOR)
    for name, multiplier in free.items():
        factor = MIN_FACTOR if name == "mix.in_proj" else 1.0
        assert slow[name] / multiplier == pytest.approx(factor)
        if name in less:
            assert less[name] / meant.get(name, 1.0) == pytest.approx(factor)
    assert "mix.in_proj" in less


@pytest.mark.parametrize(("limit", "slowed"), [(1e6, set()), (1e-6, {"mix.in_proj"})])
def test_only_what_is_slowed_is_meant_to_move_less(limit, slowed):
    """A layer of which nothing is meant is held against the others as without a limit."""
    model = Attending()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rule = LRCorrection("balance", qk_clip=limit)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, mode="correct", correction=rule)
    with probe.step():
        model(torch.randn(8, 5, 16)).square().mean().backward()
        optimizer.step()
    assert probe._supervisor._corrector.expected == pytest.approx(dict.fromkeys(slowed, MIN_FACTOR))
