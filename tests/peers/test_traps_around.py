"""More of the traps in test_traps.py: those around the numbers, in loggers, modules, optimizers and schedulers."""

from __future__ import annotations

import copy
import io
import json
import pickle
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import WandbLogger
from torch import nn, optim
from torch.optim import lr_scheduler

from spectral_monitor import SpectralMonitor, SpectralProbe
from spectral_monitor.reporting.content.essentials import essentials
from tests.noninterference import zoo
from tests.noninterference.recorder import RecordingLogger, Run
from tests.peers.watching import Weights, fit, numbers
from tests.reporting.wandb_file import wandb_records

# ------------------------------------------------------------------------------------------- steps of W&B are doubled


def wandb_rows(folder, *monitors):
    """History of an offline run, row by row, and the x axis W&B was told to use."""
    logger = WandbLogger(save_dir=folder, offline=True)
    zoo.fit(zoo.Classifier(), zoo.loader(), list(monitors), logger)
    logger.experiment.finish()
    rows, axes = [], {}
    for record in wandb_records(folder):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
        if record.WhichOneof("record_type") == "metric":
            axes[record.metric.glob_name or record.metric.name] = record.metric.step_metric
    return rows, axes


@pytest.mark.slow
def test_wandb_steps_are_doubled(tmp_path, monkeypatch):
    """W&B counts calls: one more for each measured step, none for each value, and the true step with every one."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monitor = SpectralMonitor(2, heatmap_every=0)
    plain, _ = wandb_rows(tmp_path / "plain")
    rows, axes = wandb_rows(tmp_path / "watched", monitor)
    assert axes["*"] == "trainer/global_step"
    ours = [row for row in rows if any(key.startswith("spectral") for key in row)]
    assert ours.pop()["trainer/global_step"] == 5, "the page"
    assert [row["trainer/global_step"] + 1 for row in ours] == [m.step for m in monitor.measurements] == [2, 4, 6]
    assert len(rows) == len(plain) + len(ours) + 1
    assert [row["_step"] for row in rows] == list(range(len(rows)))
    for row, m in zip(ours, monitor.measurements, strict=True):
        there = {key: value for key, value in row.items() if key.startswith("spectral")}
        assert there == pytest.approx(essentials(m))
    rows = [row for row in rows if not any(key.startswith("spectral") for key in row)]
    theirs = [{key: value for key, value in row.items() if key[0] != "_"} for row in rows]
    assert [row["trainer/global_step"] for row in theirs] == [row["trainer/global_step"] for row in plain]


# ------------------------------------------------------------------------------- attributes on the user's own modules


class Copies(pl.Callback):
    """Looks at every module's attributes and copies the model in the middle of steps."""

    def __init__(self):
        self.names, self.copies = [], []

    def look(self, trainer, module, *rest):
        self.names.append({name: set(vars(part)) for name, part in module.net.named_modules()})
        file = io.BytesIO()
        torch.save(module.net, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        self.copies += [copy.deepcopy(module.net), pickle.loads(pickle.dumps(module.net)), loaded]

    on_train_start = on_train_batch_start = on_before_backward = on_before_optimizer_step = look
    on_train_batch_end = on_train_end = look


@pytest.mark.parametrize("quantities", ["standard", "light"])
def test_attributes_on_modules_are_lost_under_copying_and_pickling(quantities):
    """The very attributes a module had, in a measured step too; copies work and do not measure."""
    monitor, watch, module = SpectralMonitor(1, quantities=quantities), Copies(), zoo.Classifier(zoo.cnn)
    before = {name: set(vars(part)) for name, part in module.net.named_modules()}
    zoo.fit(module, zoo.loader("images", count=2), [monitor, watch], RecordingLogger(Run()))
    watch.look(None, module)
    assert len(watch.copies) == 3 * (2 + 2 * 4 + 1)
    assert all(names == before for names in watch.names)
    assert len(monitor.measurements) == 2
    seen = numbers(monitor.latest)
    x = torch.randn(8, 3, 6, 6)
    for model in watch.copies:
        model(x).square().sum().backward()
        assert model[0].weight.grad.norm() > 0
    assert numbers(monitor.latest) == seen
    for model in watch.copies:
        hooks = [hook for part in model.modules() for hook in part._forward_hooks.values()]
        assert not any("spectral_monitor" in repr(hook) for hook in hooks)
    assert b"spectral_monitor" not in pickle.dumps(watch.copies)


# ------------------------------------------------------------------------------------------------------- param groups


class Groups(pl.Callback):
    """The optimizer's groups, as objects, at every moment of a step."""

    def __init__(self):
        self.seen = []

    def look(self, trainer, *rest):
        (optimizer,) = trainer.optimizers
        groups = optimizer.param_groups
        plain = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        self.seen.append((id(groups), [id(g) for g in groups], [[id(p) for p in g["params"]] for g in groups], plain))

    on_train_start = on_before_backward = on_before_optimizer_step = on_train_batch_end = on_train_end = look


@pytest.mark.parametrize("per_tensor", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_param_groups_taken_apart(per_tensor, fused):
    def build(parameters):
        groups = [{"params": [p]} for p in parameters] if per_tensor else list(parameters)
        return optim.AdamW(groups, lr=0.01, fused=fused)

    monitor, groups = SpectralMonitor(1), Groups()
    fit(monitor, zoo.Classifier(optimizer=build), groups)
    assert len(monitor.measurements) == 6
    first, *others = groups.seen
    assert len(others) == 6 * 3 + 1
    assert len(first[1]) == (6 if per_tensor else 1)
    assert all(seen == first for seen in others)
    assert all(group["fused"] is fused for group in first[3])


# ---------------------------------------------------------------------------------------------------- names of layers


class Named(nn.Module):
    """Layers whose names are made of the letters of ``module.``"""

    NAMES = ("emodule", "module", "dull", "module_", "loud", "mole")

    def __init__(self):
        super().__init__()
        for name in self.NAMES:
            self.add_module(name, nn.Linear(8, 8, bias=False))

    def forward(self, x):
        for layer in self.children():
            x = layer(x).tanh()
        return x


@pytest.mark.parametrize("wrap", [lambda net: net, nn.DataParallel], ids=["plain", "wrapped"])
def test_strip_removes_characters_not_the_prefix(wrap):
    net = Named()
    model = wrap(net)
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    probe = SpectralProbe(model, optimizer, every_n_steps=1)
    with probe.step():
        model(torch.randn(8, 8)).square().sum().backward()
        optimizer.step()
    assert tuple(info.name for info in probe.latest.layers) == Named.NAMES
    for name in Named.NAMES:
        assert probe.latest.value("feature_change", name) > 0
        assert f"spectral/update_norm/{name}" in probe.latest.scalars()


# ---------------------------------------------------------------------------------------------------------- schedules


def warmup_then_decay(optimizer):
    warmup = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    return lr_scheduler.SequentialLR(optimizer, [warmup, lr_scheduler.ExponentialLR(optimizer, 0.5)], milestones=[2])


SCHEDULES = {
    "LambdaLR": partial(lr_scheduler.LambdaLR, lr_lambda=[lambda step: 1 / (1 + step), lambda step: 0.5**step]),
    "OneCycleLR": partial(lr_scheduler.OneCycleLR, max_lr=[0.1, 0.02], total_steps=12),
    "SequentialLR": warmup_then_decay,
}


def two_rates(parameters):
    first, *rest = parameters
    return optim.AdamW([{"params": [first], "lr": 0.1}, {"params": rest, "lr": 0.02}])


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedulers_undo_or_are_disturbed(name):
    """The same rates in every step, and those are what is reported."""
    found = []
    for monitor in (None, SpectralMonitor(1)):
        torch.manual_seed(0)
        module = zoo.Classifier(optimizer=two_rates, scheduler=SCHEDULES[name], interval="step")
        weights = Weights()
        fit(monitor, module, weights, max_epochs=2)
        found.append(weights.rates)
    plain, watched = found
    assert plain == watched
    assert len({rates["net.0.weight"] for rates in plain}) >= 10, "the schedule moves"
    for m, rates in zip(monitor.measurements, plain, strict=True):
        assert m.value("lr", "net.0") == pytest.approx(rates["net.0.weight"], rel=1e-6)
        assert m.value("lr", "net.3") == pytest.approx(rates["net.3.weight"], rel=1e-6)
        assert m.value("lr", "net.0") != m.value("lr", "net.3")
        assert m.value("lr_multiplier", "net.0") == 1.0
