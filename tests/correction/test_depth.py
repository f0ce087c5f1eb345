"""Steps of networks with many matrices in a row are smaller, from the first one on."""

from __future__ import annotations

import json
import logging

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from spectral_monitor import LRCorrection, SpectralLRCorrector, SpectralProbe
from spectral_monitor.correction import policies
from tests.one_step import training_step
from tests.resume.resuming import QUIET


def chain(count):
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(count - 1) for part in (nn.Linear(16, 16), nn.ReLU())), nn.Linear(16, 4))


def over_classes(outputs):
    return nn.functional.cross_entropy(outputs, torch.arange(8) % 4)


def corrected(count, steps=1, state=None, loss_of=over_classes, **settings):
    """A probe after some steps under policy "target"."""
    model = chain(count)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, mode="correct", correction=LRCorrection(**settings))
    if state is not None:
        probe.load_state_dict(state)
    for step in range(steps):
        with training_step(probe, optimizer):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
            loss = loss_of(model(x))
            probe.report_loss(loss)
            loss.backward()
    return probe


def test_other_losses_than_those_over_classes_leave_steps_alone(capsys):
    for loss_of in (lambda x: x.square().mean(), lambda x: (x.softmax(1) - 1).square().mean()):
        assert corrected(12, loss_of=loss_of)._supervisor._corrector.wanted.depth_factor == 1
    assert "matrices stand" not in capsys.readouterr().out


@pytest.mark.parametrize(("count", "part"), [(2, 1.0), (6, 1.0), (7, 2 / 7), (12, 1 / 6)])
def test_the_first_step_has_the_part_already(count, part, monkeypatch, capsys):
    found = corrected(count).latest
    said = " ".join(capsys.readouterr().out.split())
    reason = f"{count} matrices follow each other without residual connections or batch norms"
    line = f"{reason}: steps are multiplied by {part:.2g}"
    assert (line in said) is (part < 1)
    monkeypatch.setattr(policies, "SHALLOW", 100)
    usual = corrected(count).latest
    assert "matrices stand" not in capsys.readouterr().out
    for key in ("update_natural", "lr_multiplier", "lr"):
        assert found.values[key].tolist() == pytest.approx((usual.values[key] * part).tolist(), rel=1e-4)


def factors_of(model, loss_of=over_classes):
    """Return the factor on steps after the first one, and that of a run that goes on from there."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
    settings = {"every_n_steps": 1, "mode": "correct", "correction": LRCorrection()}
    probe = SpectralProbe(model, optimizer, **settings)
    with training_step(probe, optimizer):
        loss = loss_of(model(torch.randn(8, 16)))
        probe.report_loss(loss)
        loss.backward()
    resumed = SpectralProbe(model, optimizer, **settings)
    resumed.load_state_dict(probe.state_dict())
    return [each._supervisor._corrector.wanted.depth_factor for each in (probe, resumed)]


class Residual(nn.Module):
    """A stream that so many branches join."""

    def __init__(self, count, ends=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)
        pairs = [(nn.Linear(16, 16), nn.Linear(16, 16)) for _ in range(count)]
        self.branches = nn.ModuleList(nn.Sequential(a, nn.ReLU(), nn.Dropout(0.1), b) for a, b in pairs)
        with torch.no_grad():
            for _, last in pairs:
                last.weight.mul_(ends)

    def forward(self, x):
        x = self.first(x)
        for branch in self.branches:
            x = x + branch(x)
        return self.last(x)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("count", "ends", "part"),
    [(9, 1.0, 1.0), (16, 1.0, 0.75), (36, 1.0, 0.5), (36, 0.9, 0.5), (36, 1 / 6, 1.0), (36, 0.0, 1.0)],
)
def test_of_many_residual_branches_steps_have_the_root_of_nine_over_their_number(count, ends, part, capsys):
    """Where branches end in smaller weights, as with GPT-2's initialization, steps keep their size."""
    assert factors_of(Residual(count, ends)) == [pytest.approx(part)] * 2
    line = f"the changes of {count} residual branches add up: steps are multiplied by {part:.2g}"
    assert (line in " ".join(capsys.readouterr().out.split())) is (part < 1)


class PostNorm(nn.Module):
    """Residual blocks with norms behind their sums, as in the first transformer."""

    def __init__(self, count):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, 16)
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)) for _ in range(count)
        )
        self.norms, self.last = nn.ModuleList(nn.LayerNorm(16) for _ in range(count)), nn.Linear(16, 4)

    def forward(self, x):
        x = self.first(x)
        for branch, norm in zip(self.branches, self.norms, strict=True):
            x = norm(x + branch(x))
        return self.last(x)


@pytest.mark.parametrize("loss_of", [over_classes, lambda outputs: outputs.square().mean()])
@pytest.mark.parametrize(("count", "part"), [(0, 1.0), (1, 0.8), (4, 0.5), (24, 1 / 7)])
def test_of_post_norm_branches_steps_are_divided_by_one_and_a_quarter_of_their_number(count, part, loss_of, capsys):
    """Whatever the loss is, and after a checkpoint too."""
    assert factors_of(PostNorm(count), loss_of) == [pytest.approx(part)] * 2
    line = f"a norm follows each of {count} residual branches (post-norm): steps are multiplied by {part:.2g}"
    assert (line in " ".join(capsys.readouterr().out.split())) is (part < 1)


@pytest.mark.parametrize("frozen", [0, 4, 8])
def test_of_post_norm_branches_those_that_are_frozen_do_not_count(frozen):
    """Their part is that of the entries: adapters on a frozen network have next to none."""
    model = PostNorm(8)
    model.branches[:frozen].requires_grad_(False)
    trained_part = 1 - 2 * frozen / 17  # of operators: the first one is not in a branch
    assert factors_of(model) == [pytest.approx(1 / (1 + trained_part * 8 / 4))] * 2


def normed(count, norm=nn.BatchNorm1d):
    """Matrices with a norm of channels behind each."""
    torch.manual_seed(0)
    layers = [part for _ in range(count) for part in (nn.Linear(16, 16), norm(16), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(16, 4))


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, lambda width: nn.GroupNorm(4, width)])
@pytest.mark.parametrize(("count", "part"), [(2, 1.0), (4, 0.5**0.5), (5, 0.4**0.5)])
def test_of_matrices_in_front_of_batch_or_group_norms_steps_have_the_root_of_two_over_their_number(
    count, part, norm, capsys
):
    """After a checkpoint too."""
    assert factors_of(normed(count, norm)) == [pytest.approx(part)] * 2
    line = f"a batch or group norm follows each of {count} matrices in a row: steps are multiplied by {part:.2g}"
    assert (line in " ".join(capsys.readouterr().out.split())) is (part < 1)


def test_of_normed_matrices_those_that_are_frozen_do_not_count_nor_do_other_losses():
    model = normed(8)
    model[9:12].requires_grad_(False)
    assert factors_of(model) == [pytest.approx((2 / 7) ** 0.5)] * 2
    model[:9].requires_grad_(False)
    assert factors_of(model) == [pytest.approx((2 / 4) ** 0.5)] * 2
    assert factors_of(normed(8), lambda outputs: outputs.square().mean()) == [1.0] * 2


@pytest.mark.parametrize("settings", [{"size": "lr"}, {"policy": "balance", "size": "lr"}])
def test_where_the_rate_is_the_size_depth_changes_nothing(settings, monkeypatch):
    found = corrected(12, 3, **settings).multipliers
    monkeypatch.setattr(policies, "SHALLOW", 100)
    assert found == corrected(12, 3, **settings).multipliers


def test_a_loss_that_is_reported_after_the_backward_pass_is_read_too():
    model = chain(8)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, mode="correct", correction=LRCorrection())
    with training_step(probe, optimizer):
        loss = over_classes(model(torch.randn(8, 16)))
        loss.backward()
        probe.report_loss(loss.detach())
    assert probe._supervisor._corrector.wanted.depth_factor == 1, "it has no graph"
    with probe.step():
        optimizer.zero_grad()
        loss = over_classes(model(torch.randn(8, 16)))
        loss.backward()
        optimizer.step()
        probe.report_loss(loss)
    assert probe._supervisor._corrector.wanted.depth_factor == 1 / 4


def test_it_goes_on_from_its_state_before_a_graph_is_seen():
    assert '"depth": [12, 0, 0, 0]' in json.dumps(corrected(12, 3).state_dict(), default=str)
    probe = corrected(12, 0, corrected(12, 3).state_dict())
    assert probe._supervisor._corrector.wanted.depth_factor == pytest.approx(1 / 6)
    assert "'depth'" not in str(corrected(6, 3).state_dict())


def test_the_callback_sees_the_graph_of_the_loss_and_says_so_once(caplog):
    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = chain(8)

        def training_step(self, batch, _):
            return over_classes(self.network(batch[0]))

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-3)

    corrector = SpectralLRCorrector(every_n_steps=1, verbose=1)
    trainer = pl.Trainer(**QUIET, logger=False, max_steps=4, callbacks=[corrector])
    log = logging.getLogger("lightning.pytorch.spectral_monitor")
    caplog.set_level("INFO", log.name)
    log.addHandler(caplog.handler)
    try:
        trainer.fit(Module(), DataLoader(TensorDataset(torch.randn(32, 16)), batch_size=8))
    finally:
        log.removeHandler(caplog.handler)
    said = " ".join(caplog.text.split())
    line = "8 matrices follow each other without residual connections or batch norms: steps are multiplied by 0.25"
    assert said.count(line) == said.count("the constant learning rate (0.001) counts as size") > 0


def test_outputs_leave_what_the_loss_of_an_earlier_run_has_shown():
    """Until the loss of a resumed run is reported, possibly after the step."""
    probe = corrected(12, 0, corrected(12, 3).state_dict())
    probe._supervisor._read_graph(chain(12)(torch.randn(8, 16)))
    assert probe._supervisor._corrector.wanted.depth_factor == pytest.approx(1 / 6)
