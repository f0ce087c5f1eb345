"""Output layers that read recurrent ones take larger steps under Adam."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spectral_monitor import LRCorrection, SpectralProbe
from tests.one_step import training_step

WIDTH = 8


class Tagger(nn.Module):
    def __init__(self, norm=False):
        super().__init__()
        torch.manual_seed(0)
        self.recurrent, self.head = nn.GRU(4, WIDTH, batch_first=True), nn.Linear(WIDTH, 3)
        self.norm = nn.LayerNorm(WIDTH) if norm else nn.Identity()

    def forward(self, x):
        return self.head(self.norm(self.recurrent(x)[0]))


def corrected(model, optimizer, **settings):
    probe = SpectralProbe(model, optimizer, every_n_steps=1, mode="correct", correction=LRCorrection(**settings))
    with training_step(probe, optimizer):
        loss = model(torch.randn(4, 6, 4)).log_softmax(-1)[..., 0].neg().mean()
        probe.report_loss(loss)
        loss.backward()
    return probe


def shares(probe):
    wanted = probe._supervisor._corrector.wanted
    return {layer.info.name: wanted.share(layer) for layer in wanted.layers}


@pytest.mark.parametrize(("norm", "kind", "factor"), [(False, "AdamW", 2), (True, "AdamW", 1), (False, "SGD", 1)])
def test_the_step_of_the_readout_is_twice_as_large(norm, kind, factor):
    model = Tagger(norm)
    probe = corrected(model, getattr(torch.optim, kind)(model.parameters(), 1e-3))
    found = shares(probe)
    probe._supervisor._corrector.wanted.recurrent_readouts.clear()
    usual = shares(probe)
    assert found["head"] == pytest.approx(factor * usual["head"])
    assert {name: share for name, share in found.items() if name != "head"} == {
        name: share for name, share in usual.items() if name != "head"
    }


def test_a_resumed_run_knows_before_it_sees_a_graph():
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    state = corrected(model, optimizer).state_dict()
    resumed = SpectralProbe(model, optimizer, every_n_steps=1, mode="correct", correction=LRCorrection())
    assert resumed._supervisor._corrector.wanted.recurrent_readouts == set()
    resumed.load_state_dict(state)
    assert resumed._supervisor._corrector.wanted.recurrent_readouts == {"head"}


def test_where_the_rate_is_the_size_nothing_changes():
    model = Tagger()
    probe = corrected(model, torch.optim.AdamW(model.parameters(), 1e-3), size="lr")
    assert not probe._supervisor._corrector.wanted.recurrent_readouts
