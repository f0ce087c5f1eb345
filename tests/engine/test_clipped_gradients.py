"""Contributions are those of the loss's gradient, before it is clipped; oracles are autograd's own gradients."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from spectral_monitor import LRCorrection, SpectralMonitor, SpectralProbe
from spectral_monitor.capture.hooks.arrived_gradients import ArrivedGradients
from spectral_monitor.engine.weights.gradients import clipping_since, gradient_norms

BATCHES = 4


class Net(pl.LightningModule):
    """Keeps the weights before and after each step."""

    def __init__(self, adam=False):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).double()
        self.adam = adam
        self.kept = [copy.deepcopy(self.net)]

    def training_step(self, batch, batch_idx):
        return (self.net(batch[0]) - batch[1]).square().mean()

    def on_train_batch_end(self, *_):
        self.kept.append(copy.deepcopy(self.net))

    def configure_optimizers(self):
        return (
            torch.optim.Adam(self.net.parameters(), 0.01) if self.adam else torch.optim.SGD(self.net.parameters(), 0.1)
        )


class Own(Net):
    """Clips in the place that Lightning has for it, each parameter by itself."""

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        for p in self.parameters():
            nn.utils.clip_grad_norm_(p, 0.05)


def data():
    generator = torch.Generator().manual_seed(1)
    draw = {"generator": generator, "dtype": torch.float64}
    return [(torch.randn(32, 6, **draw), 3 * torch.randn(32, 2, **draw)) for _ in range(BATCHES)]


def fitted(tmp_path, module, accumulate=1, quantities="light", correct=None, **trainer):
    mode = {"mode": "correct", "correction": correct} if correct else {}
    watch = SpectralMonitor(every_n_steps=1, quantities=quantities, verbose=0, tol=1e-6, **mode)
    pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=[watch],
        logger=CSVLogger(tmp_path),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=accumulate,
        **trainer,
    ).fit(module, torch.utils.data.DataLoader(data(), batch_size=None))
    return watch


def oracle(module, step, accumulate=1):
    """-<g, dW> of each parameter in a step, g the mean over its micro-batches."""
    first = (step - 1) * accumulate
    before, after = module.kept[first], module.kept[first + accumulate]
    before.zero_grad()
    for x, y in data()[first : first + accumulate]:
        ((before(x) - y).square().mean() / accumulate).backward()
    pairs = zip(before.named_parameters(), after.parameters(), strict=True)
    return {name: -float((p.grad * (q - p)).sum()) for (name, p), q in pairs}


NAMES = {"0.weight": "net.0", "0.bias": "net.0.bias", "2.weight": "net.2", "2.bias": "net.2.bias"}


@pytest.mark.parametrize("adam", [False, True])
@pytest.mark.parametrize("clip", [None, 0.05, 1e3])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_contributions_are_of_the_gradient_before_its_norm_is_clipped(tmp_path, adam, clip, accumulate):
    module = Net(adam)
    watch = fitted(tmp_path, module, accumulate, gradient_clip_val=clip)
    assert [m.step for m in watch.measurements] == list(range(1, BATCHES // accumulate + 1))
    for measured in watch.measurements:
        want = oracle(module, measured.step, accumulate)
        for name, layer in NAMES.items():
            assert measured.value("contribution", layer) == pytest.approx(want[name], rel=1e-5)
        assert measured.summary["loss_change_predicted"] == pytest.approx(-sum(want.values()), rel=1e-6)


@pytest.mark.parametrize("clip", [None, 0.05, 1e3])
def test_the_factor_of_clipping_is_the_limit_over_the_norm_of_the_gradient(tmp_path, clip):
    module = Net()
    for measured in fitted(tmp_path, module, gradient_clip_val=clip).measurements:
        (x, y), before = data()[measured.step - 1], module.kept[measured.step - 1]
        gradients = torch.autograd.grad((before(x) - y).square().mean(), list(before.parameters()))
        norm = float(torch.stack([g.norm() for g in gradients]).norm())
        assert measured.summary["clip_factor"] == pytest.approx(min((clip or 1e9) / norm, 1.0), rel=1e-5)


def test_a_correction_that_splits_groups_does_not_hide_what_was_clipped(tmp_path):
    module = Net(adam=True)
    watch = fitted(tmp_path, module, gradient_clip_val=0.05, correct=LRCorrection())
    assert len(watch.measurements) == BATCHES
    for measured in watch.measurements:
        want = oracle(module, measured.step)
        assert measured.summary["loss_change_predicted"] == pytest.approx(-sum(want.values()), rel=1e-6)
        assert measured.value("contribution", "net.0") == pytest.approx(want["0.weight"], rel=1e-5)


class Freezing(Net):
    """Takes a parameter's gradient away before the others are clipped."""

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.net[2].bias.grad = None
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)


def test_a_gradient_that_is_gone_does_not_hide_the_factor_of_the_others(tmp_path):
    module = Freezing()
    watch = fitted(tmp_path, module, gradient_clip_val=0.05)
    for measured in watch.measurements:
        want = oracle(module, measured.step)
        assert measured.value("contribution", "net.0") == pytest.approx(want["0.weight"], rel=1e-5)
        assert measured.value("contribution", "net.2") == pytest.approx(want["2.weight"], rel=1e-5)
        assert measured.value("contribution", "net.2.bias") != measured.value("contribution", "net.2.bias")


def test_sizes_of_gradients_are_those_before_the_norm_is_clipped(tmp_path):
    module = Net()
    watch = fitted(tmp_path, module, quantities=["gradient_natural"], gradient_clip_val=0.05)
    for measured in watch.measurements:
        (x, y), before = data()[measured.step - 1], module.kept[measured.step - 1]
        (g,) = torch.autograd.grad((before(x) - y).square().mean(), [before[0].weight])
        natural = (16 / 6) ** 0.5 * float(torch.linalg.matrix_norm(g, 2))
        assert measured.value("gradient_natural", "net.0") == pytest.approx(natural, rel=1e-5)


def test_the_prediction_of_a_clipped_step_predicts(tmp_path):
    module = Net()
    watch = fitted(tmp_path, module, gradient_clip_val=0.001)
    (x, y), before, after = data()[0], module.kept[0], module.kept[1]
    change = float((after(x) - y).square().mean() - (before(x) - y).square().mean())
    assert watch.measurements[0].summary["loss_change_predicted"] == pytest.approx(change, rel=0.01)


def largest():
    """The largest entry of the first step's gradient."""
    net, (x, y) = Net().net, data()[0]
    return max(float(g.abs().max()) for g in torch.autograd.grad((net(x) - y).square().mean(), list(net.parameters())))


@pytest.mark.parametrize("limit", [0.01, 0.99 * largest()])
def test_clipped_entry_by_entry_contributions_are_not_known(tmp_path, limit):
    watch = fitted(tmp_path, Net(), gradient_clip_val=limit, gradient_clip_algorithm="value")
    for measured in watch.measurements if limit == 0.01 else list(watch.measurements)[:1]:
        assert measured.values["contribution"].isnan().all()
        assert "entry by entry" in measured.why("contribution", "net.0")
        assert measured.summary["loss_change_predicted"] != measured.summary["loss_change_predicted"]
        assert measured.summary["clip_factor"] != measured.summary["clip_factor"]
        assert "entry by entry" in measured.why("clip_factor", "summary")
    watch = fitted(tmp_path, Net(), 1, ["gradient_natural"], gradient_clip_val=0.01, gradient_clip_algorithm="value")
    assert "entry by entry" in watch.latest.why("gradient_natural", "net.0")


def test_entry_by_entry_without_effect_nothing_is_lost(tmp_path):
    module = Net()
    watch = fitted(tmp_path, module, gradient_clip_val=1e3, gradient_clip_algorithm="value")
    want = oracle(module, 1)
    assert watch.measurements[0].value("contribution", "net.0") == pytest.approx(want["0.weight"], rel=1e-5)


def test_parameters_that_are_clipped_one_by_one_are_told_from_a_factor(tmp_path):
    watch = fitted(tmp_path, Own())
    assert watch.latest.values["contribution"].isnan().all()
    assert "entry by entry" in watch.latest.why("contribution", "net.0")


@pytest.mark.parametrize("include", [["net.0"], None])
def test_parameters_that_are_not_measured_count_too(tmp_path, include):
    module = Net()
    watch = SpectralMonitor(every_n_steps=1, quantities="light", include=include, verbose=0)
    pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=[watch],
        logger=CSVLogger(tmp_path),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=0.05,
    ).fit(module, torch.utils.data.DataLoader(data(), batch_size=None))
    want = -sum(oracle(module, 1).values())
    assert watch.measurements[0].summary["loss_change_predicted"] == pytest.approx(want, rel=1e-6)


def clip_norm(net):
    nn.utils.clip_grad_norm_(net.parameters(), 0.05)


def clip_loosely(net):
    nn.utils.clip_grad_norm_(net.parameters(), 1e3)


def clip_values(net):
    nn.utils.clip_grad_value_(net.parameters(), 0.01)


def clip_layers(net):
    for p in net.parameters():
        nn.utils.clip_grad_norm_(p, 0.05)


def looped(clip, scale=None, correct=None, micro_batches=1, adam=False):
    """A loop of one's own, and the weights before and after each step."""
    module = Net(adam)
    net, optimizer = module.net, module.configure_optimizers()
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    mode = {"mode": "correct", "correction": correct} if correct else {}
    probe = SpectralProbe(net, optimizer, every_n_steps=1, quantities="light", tol=1e-6, **mode)
    batches = data()
    for first in range(0, BATCHES, micro_batches):
        with probe.step():
            optimizer.zero_grad()
            for x, y in batches[first : first + micro_batches]:
                loss = (net(x) - y).square().mean() / micro_batches
                scaler.scale(loss).backward()
            if micro_batches == 1:
                probe.report_loss(loss, lambda x=x, y=y: (net(x) - y).square().mean())
            scaler.unscale_(optimizer)
            clip(net)
            scaler.step(optimizer)
            scaler.update()
        module.kept += [copy.deepcopy(net)] * micro_batches
    return module, probe


@pytest.mark.parametrize("clip", [clip_norm, clip_loosely])
@pytest.mark.parametrize("scale", [None, 1024.0])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("adam", [False, True])
def test_a_loop_of_ones_own_need_not_tell_that_it_clips(clip, scale, micro_batches, adam):
    module, probe = looped(clip, scale, micro_batches=micro_batches, adam=adam)
    assert [m.step for m in probe.measurements] == list(range(1, BATCHES // micro_batches + 1))
    for measured in probe.measurements:
        want = oracle(module, measured.step, micro_batches)
        for name, layer in NAMES.items():
            assert measured.value("contribution", layer.removeprefix("net.")) == pytest.approx(want[name], rel=1e-5)
        assert measured.summary["loss_change_predicted"] == pytest.approx(-sum(want.values()), rel=1e-5)


@pytest.mark.parametrize("change", [clip_values, clip_layers])
def test_what_no_factor_says_is_not_known_in_a_loop_of_ones_own_either(change):
    _, probe = looped(change)
    assert probe.latest.values["contribution"].isnan().all()
    assert "entry by entry" in probe.latest.why("contribution", "0")


def test_steps_of_clipped_gradients_are_shortened_as_others_are():
    """The edge that a correction goes by is of the gradient before it is clipped."""
    module, probe = looped(clip_norm, correct=LRCorrection(), adam=True)
    for k, measured in enumerate(probe.measurements):
        (x, y), before, after = data()[k], module.kept[k], module.kept[k + 1]
        change = float((after(x) - y).square().mean() - (before(x) - y).square().mean())
        predicted = -sum(oracle(module, k + 1).values())
        assert measured.summary["edge"] == pytest.approx(2 * (1 - change / predicted), rel=1e-2)
        assert abs(measured.summary["edge"]) > 1e-3, "so that it tells"


def test_no_hook_remains_on_the_graph_of_parameters():
    _, probe = looped(clip_norm)
    assert not probe._engine._arrived._hooks.handles
    assert not probe._engine._arrived._norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_gradients_that_nobody_touches_have_the_very_norms_they_arrived_with(dtype):
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(size, dtype=dtype)) for size in (3, 1000, (64, 64), ())]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    arrived = ArrivedGradients([optimizer], None, (), gradient_norms, lambda what: nullcontext())
    arrived.arm()
    sum((w * w.conj()).real.float().sum() for w in weights).backward()
    parameters, norms = arrived.of(optimizer)
    assert list(map(id, parameters)) == list(map(id, weights))
    found = clipping_since((parameters, norms), weights, gradient_norms(weights))
    assert torch.equal(norms.float(), gradient_norms(weights).float())
    assert (float(found.factor), float(found.uneven)) == (1.0, 0.0)
    arrived.disarm()
