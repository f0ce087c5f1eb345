"""The matrix that reads data far below RMS 1 takes larger steps, which make up for the root of that."""

from __future__ import annotations

import copy

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from spectral_monitor import LRCorrection, SpectralLRCorrector, SpectralProbe
from tests.resume.resuming import QUIET

X = torch.randn(64, 48, generator=torch.Generator().manual_seed(0))
Y = (X @ torch.randn(48, 4, generator=torch.Generator().manual_seed(1))).argmax(1)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 4))


def in_a_loop(x, steps=3, model=None, state=None, offer=True):
    model = model or network()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    rule = LRCorrection()
    probe = SpectralProbe(
        model, optimizer, every_n_steps=1, mode="correct", correction=rule, quantities=rule.quantities
    )
    if state is not None:
        probe.load_state_dict(state)
    for _ in range(steps):
        with probe.step():
            loss = F.cross_entropy(model(x), Y)
            probe.report_loss(loss, (lambda: F.cross_entropy(model(x), Y)) if offer else None)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return probe


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = network()

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


def under_lightning(x):
    corrector = SpectralLRCorrector()
    trainer = pl.Trainer(max_steps=3, max_epochs=-1, callbacks=[corrector], logger=False, accelerator="cpu", **QUIET)
    trainer.fit(Module(), DataLoader(TensorDataset(x, Y), batch_size=64))
    return corrector


def wanted_of(probe):
    return probe._supervisor._corrector.wanted


@pytest.mark.parametrize(("scale", "factor"), [(1.0, 1.0), (0.3, 1.0), (0.04, 5.0), (0.0025, 20.0)])
def test_the_wanted_step_grows_by_the_root(scale, factor):
    x = X / X.square().mean().sqrt() * scale
    usual, found = wanted_of(in_a_loop(X)), wanted_of(in_a_loop(x))
    first, last = (found.layers[i] for i in (0, 2))
    assert [layer.info.name for layer in (first, last)] == ["0", "2"]
    assert found.share(first) / usual.share(first) == pytest.approx(factor, rel=1e-5)
    assert found.share(last) == usual.share(last)


def test_the_update_has_the_wanted_size():
    x = X / X.square().mean().sqrt() * 0.04
    probe = in_a_loop(x, steps=12)
    update = probe.latest.value("update_natural", "0")
    wanted = wanted_of(probe)
    part = probe._supervisor._corrector.wanted.size * wanted.share(wanted.layers[0]) / 2  # a rate without a schedule
    assert update == pytest.approx(part, rel=0.3)
    assert update > 3 * in_a_loop(X, steps=12).latest.value("update_natural", "0")


def test_it_is_not_known_where_no_step_is_run_again():
    assert wanted_of(in_a_loop(X * 0.01, offer=False)).input_rms == 1.0


def test_words_have_no_size():
    torch.manual_seed(0)
    words = torch.randint(20, (64, 6))
    model = nn.Sequential(nn.Embedding(20, 16), nn.Flatten(), nn.Linear(96, 4))
    assert wanted_of(in_a_loop(words, model=model)).input_rms == 1.0


def test_a_resumed_run_keeps_what_it_saw():
    x = X / X.square().mean().sqrt() * 0.04
    probe = in_a_loop(x)
    state = copy.deepcopy(probe.state_dict())
    for other in (X, x / 2):
        assert wanted_of(in_a_loop(other, state=state)).input_rms == pytest.approx(0.04)
    usual = in_a_loop(X).state_dict()
    assert wanted_of(in_a_loop(x, state=copy.deepcopy(usual))).input_rms == 1.0


def test_no_hook_is_left():
    model = network()
    probe = in_a_loop(X * 0.01, model=model)
    assert wanted_of(probe).input_rms == pytest.approx(0.01, rel=0.1)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_lightning_shows_it_too():
    usual, small = under_lightning(X), under_lightning(X * 0.04)
    assert small.multipliers["network.0"] > 2 * usual.multipliers["network.0"]
    assert small.multipliers["network.2"] == pytest.approx(usual.multipliers["network.2"], rel=0.5)
