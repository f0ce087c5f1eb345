"""What is logged where and when, what is printed, and how the callback lives through a Trainer's life."""

from __future__ import annotations

import copy
import csv
import json
import logging
import math
import pickle
import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from spectral_monitor import SpectralMonitor, SpectralMonitorWarning
from spectral_monitor.quantities import QUANTITIES, TIERS
from spectral_monitor.reporting.content.essentials import essential_keys, essentials
from tests.callbacks.quickfit import fit, recording
from tests.noninterference import zoo
from tests.noninterference.recorder import RecordingLogger, Run, of_module, of_optimizer
from tests.reporting.wandb_file import wandb_records


def expected(monitor):
    """(step, key) -> value of everything that should have been logged."""
    return {(m.step - 1, key): value for m in monitor.measurements for key, value in essentials(m).items()}


def read_tensorboard(folder):
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {(e.step, tag): e.value for tag in events.Tags()["scalars"] for e in events.Scalars(tag)}


def read_csv(folder):
    with Path(folder, "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {(int(row["step"]), key): float(value) for row in rows for key, value in row.items() if value != ""}


def read_wandb(folder):
    """History of an offline run, straight from its file."""
    found = {}
    for record in wandb_records(folder):
        items = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
        found |= {(items["trainer/global_step"], key): value for key, value in items.items()}
    return found


def ours(found):
    """What the monitor has logged."""
    wanted = {key: value for key, value in found.items() if key[1].startswith("spectral")}
    return {key: value for key, value in wanted.items() if not key[1].startswith("spectral/page")}


def assert_logged(found, monitor):
    wanted = expected(monitor)
    assert len(wanted) > 50
    assert set(ours(found)) == set(wanted)
    for key, value in wanted.items():
        assert found[key] == pytest.approx(value, rel=1e-5), key


def test_tensorboard(tmp_path):
    monitor = SpectralMonitor(every_n_steps=2)
    trainer = fit(monitor, logger=TensorBoardLogger(tmp_path))
    assert_logged(read_tensorboard(trainer.logger.log_dir), monitor)


def test_csv(tmp_path):
    monitor = SpectralMonitor(every_n_steps=2)
    trainer = fit(monitor, logger=CSVLogger(tmp_path))
    found = read_csv(trainer.logger.log_dir)
    assert_logged(found, monitor)
    assert len([key for key in found if key[1] == "loss_step"]) == 6, "Lightning's own rows are all there"


@pytest.mark.slow
def test_wandb(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monitor = SpectralMonitor(every_n_steps=2, heatmap_every=0)
    logger = WandbLogger(save_dir=tmp_path, offline=True)
    fit(monitor, logger=logger)
    logger.experiment.finish()
    assert_logged(read_wandb(tmp_path), monitor)


def test_several_loggers_get_the_same(tmp_path):
    monitor = SpectralMonitor(every_n_steps=3)
    board, sheet, memory = TensorBoardLogger(tmp_path / "a"), CSVLogger(tmp_path / "b"), recording()
    fit(monitor, logger=[board, sheet, memory])
    assert_logged(read_tensorboard(board.log_dir), monitor)
    assert_logged(read_csv(sheet.log_dir), monitor)
    told = {(step - 1, key): value for step, metrics in memory.spectral for key, value in metrics.items()}
    assert_logged(told, monitor)


def test_one_call_per_logger_and_measured_step():
    monitor, loggers = SpectralMonitor(every_n_steps=2), [recording(), recording()]
    fit(monitor, logger=loggers)
    for logger in loggers:
        assert [step for step, _ in logger.spectral] == [2, 4, 6]


def test_keys_are_quantity_and_layer():
    monitor, logger = SpectralMonitor(every_n_steps=6), recording()
    fit(monitor, logger=logger)
    ((_, metrics),) = logger.spectral
    layers = {info.name for info in monitor.latest.layers}
    assert layers == {"net.0", "net.0.bias", "net.3", "net.3.bias", "net.5", "net.5.bias"}
    for key in metrics:
        section, rest = key.split("/", 1)
        assert section == "spectral" or section.removeprefix("spectral_").removesuffix("vs_typical_log2").rstrip(
            "_"
        ) in {*QUANTITIES, ""}
        assert section == "spectral" or rest in layers or rest.startswith(("all/", "limits/"))
        assert math.isfinite(metrics[key])
    for quantity in essential_keys():
        assert f"spectral_{quantity}/net.3" in metrics, quantity
    assert {"spectral/summary/overhead_ms", "spectral/summary/violations"} <= set(metrics)
    everything = recording()
    fit(SpectralMonitor(every_n_steps=6, log="all"), logger=everything)
    for quantity in TIERS["standard"]:
        assert f"spectral/{quantity}/net.3" in everything.spectral[0][1], quantity


@pytest.mark.parametrize("quantities", ["light", ["update_norm"], ["feature_change", "lr"]], ids=str)
def test_only_what_is_asked_for(quantities):
    monitor, logger = SpectralMonitor(every_n_steps=2, quantities=quantities), recording()
    fit(monitor, logger=logger)
    keys = set(TIERS["light"] if quantities == "light" else quantities)
    assert set(monitor.latest.values) == keys
    logged = (keys & set(essential_keys())) | {"vs_typical_log2"} if quantities == "light" else keys
    for _, metrics in logger.spectral:
        sections = {key.split("/")[0] for key in metrics}
        assert sections - {"spectral_weight_natural_vs_typical_log2"} == {
            "spectral",
            *(f"spectral_{k}" for k in logged),
        }


class CountsSteps(zoo.Classifier):
    """Knows how often its optimizer really stepped, and the weights around each."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        self.taken, self.weights = 0, [self.net[0].weight.detach().clone()]
        optimizer.register_step_post_hook(self._count)
        return optimizer

    def _count(self, *_):
        self.taken += 1
        self.weights.append(self.net[0].weight.detach().clone())


@pytest.mark.parametrize(("accumulate", "batches"), [(1, 4), (3, 7), (3, 6), (2, 5)])
@pytest.mark.parametrize("every", [1, 2, 5])
def test_steps_are_those_the_optimizer_took(accumulate, batches, every):
    monitor, module, logger = SpectralMonitor(every_n_steps=every), CountsSteps(), recording()
    fit(monitor, module, zoo.loader(count=batches), logger, accumulate_grad_batches=accumulate, max_epochs=2)
    assert module.taken == 2 * math.ceil(batches / accumulate), "the last window of an epoch may be shorter"
    steps = list(range(every, module.taken + 1, every))
    assert [step for step, _ in logger.spectral] == steps
    for m in monitor.measurements:
        update = module.weights[m.step] - module.weights[m.step - 1]
        assert m.value("update_fro", "net.0") == pytest.approx(update.norm().item(), rel=1e-5)
        assert m.value("update_norm", "net.0") == pytest.approx(torch.linalg.matrix_norm(update, 2).item(), rel=0.02)


@pytest.mark.parametrize(("verbose", "logger", "lines"), [(1, False, 1), (0, False, 0), (1, None, 0)])
def test_no_logger_is_a_line_of_the_start(verbose, logger, lines, caplog):
    """And no warning, which would be an error here: a trainer has no logger because somebody wants none."""
    monitor = SpectralMonitor(every_n_steps=1, verbose=verbose)
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.spectral_monitor"):
        fit(monitor, logger=logger)
    said = [" ".join(record.getMessage().split()) for record in caplog.records]
    kept = (
        "spectral monitor: the Trainer has no logger: measurements are kept in monitor.measurements, and the last one "
        "is printed at the end"
    )
    assert said.count(kept) == lines
    assert len(monitor.measurements) == 6


class Broken(RecordingLogger):
    def log_metrics(self, metrics, step=None):
        if any(key.startswith("spectral") for key in metrics):
            raise OSError("disk full")
        super().log_metrics(metrics, step)


def test_a_logger_that_fails_costs_a_warning():
    broken, whole, monitor = Broken(Run()), recording(), SpectralMonitor(every_n_steps=1)
    with pytest.warns(SpectralMonitorWarning, match=r"Broken did not take the measurement \(OSError: disk full\)") as w:
        trainer = fit(monitor, logger=[broken, whole])
    assert len([x for x in w if x.category is SpectralMonitorWarning]) == 1
    assert trainer.global_step == len(whole.spectral) == len(monitor.measurements) == 6
    assert broken.run.calls == whole.run.calls != []


def test_history_is_bounded():
    monitor = SpectralMonitor(every_n_steps=1, history=2)
    fit(monitor)
    assert [m.step for m in monitor.measurements] == [5, 6]
    assert monitor.latest.step == 6


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
@pytest.mark.parametrize("fitted", [False, True])
def test_it_can_be_copied_and_pickled(duplicate, fitted):
    monitor = SpectralMonitor(every_n_steps=2, exclude=["*.bias"], roles={"net.5": "operator"})
    if fitted:
        fit(monitor)
    twin = duplicate(monitor)
    assert repr(twin) == repr(monitor)
    assert f"measurements={3 * fitted}" in repr(twin)
    assert twin.table() == monitor.table()
    assert twin.settings == monitor.settings
    assert [m.scalars() for m in twin.measurements] == [m.scalars() for m in monitor.measurements]
    count = len(twin.measurements)
    fit(twin)
    assert len(twin.measurements) == count + 3
    assert len(monitor.measurements) == count


def test_what_is_printed(capsys):
    monitor = SpectralMonitor(every_n_steps=2)
    fit(monitor, max_epochs=2)
    out = capsys.readouterr().out
    assert out.count("3 matrices and 3 biases and gains are measured") == 1
    assert out.index("guessed: the last matrix") < out.index("spectral monitor, step 12")
    assert out.count("spectral monitor, step") == 1
    assert monitor.table() in out


def test_how_much_is_printed(capsys):
    said = {}
    for verbose in (0, 1, 2):
        fit(SpectralMonitor(every_n_steps=2, verbose=verbose), max_epochs=1)
        said[verbose] = capsys.readouterr().out
    assert "spectral" not in said[0]
    assert said[1].count("spectral monitor") == said[2].count("spectral monitor") == 2
    assert "every 2 steps" in said[1]
    fit(SpectralMonitor(every_n_steps=50, verbose=0))
    assert "nothing was measured" not in capsys.readouterr().out
    with pytest.raises(ValueError, match="verbose must be 0, 1 or 2, got 3"):
        SpectralMonitor(verbose=3)


def test_that_nothing_was_measured_is_said(capsys):
    monitor = SpectralMonitor(every_n_steps=50)
    assert monitor.latest is None
    assert monitor.table() == "nothing measured yet"
    fit(monitor)
    out = " ".join(capsys.readouterr().out.split())
    assert "nothing was measured in 6 optimizer steps with every_n_steps=50; the next is step 50" in out


def test_fit_again_with_a_new_trainer():
    monitor, logger = SpectralMonitor(every_n_steps=3), recording()
    fit(monitor)
    fit(monitor, logger=logger)
    assert [m.step for m in monitor.measurements] == [3, 6, 3, 6]
    assert [step for step, _ in logger.spectral] == [3, 6]


def test_fit_again_with_the_same_trainer():
    """Steps go on, and so does drift."""
    monitor, logger, module = SpectralMonitor(every_n_steps=3), recording(), CountsSteps()
    start = module.net[0].weight.detach().clone()
    trainer = fit(monitor, module, logger=logger)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, zoo.loader())
    assert [step for step, _ in logger.spectral] == [3, 6, 9, 12]
    drift = (module.weights[-1] - start).norm() / start.norm()
    assert monitor.latest.value("drift_fro_ratio", "net.0") == pytest.approx(drift.item(), rel=1e-4)


def test_a_fit_in_which_nothing_is_measured_shows_no_old_table(capsys):
    monitor = SpectralMonitor(every_n_steps=6)
    fit(monitor)
    capsys.readouterr()
    fit(monitor, data=zoo.loader(count=5))
    out = capsys.readouterr().out
    assert "nothing was measured in 5 optimizer steps with" in out
    assert "spectral monitor, step" not in out


def test_a_fit_that_goes_on_counts_its_own_steps(capsys):
    monitor, module = SpectralMonitor(every_n_steps=50), CountsSteps()
    trainer = fit(monitor, module)
    capsys.readouterr()
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, zoo.loader(count=5))
    out = " ".join(capsys.readouterr().out.split())
    assert "nothing was measured in 5 optimizer steps after step 6 with every_n_steps=50; the next is step 50" in out


def test_a_resumed_fit_that_is_too_short_for_the_default_schedule_says_so(tmp_path, capsys):
    first = fit(SpectralMonitor(), max_epochs=6, default_root_dir=tmp_path)  # to step 36
    first.save_checkpoint(tmp_path / "last.ckpt")
    capsys.readouterr()
    fit(SpectralMonitor(), max_epochs=8, default_root_dir=tmp_path, ckpt_path=tmp_path / "last.ckpt")
    out = capsys.readouterr().out
    said = "nothing was measured in 12 optimizer steps after step 36 with every_n_steps='1, 2, 4, ..., every 100'; the"
    assert f"{said} next is step 64" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80


def test_fast_dev_run():
    monitor = SpectralMonitor(every_n_steps=1)
    fit(monitor, fast_dev_run=True)
    assert [m.step for m in monitor.measurements] == [1]
    with pytest.raises(KeyError, match=r"'x' was not measured\. Measured: "):
        monitor.latest.value("x", "net.0")


def test_other_entry_points_do_nothing():
    monitor, module = SpectralMonitor(every_n_steps=1), zoo.Classifier()
    trainer = pl.Trainer(
        accelerator="cpu", callbacks=[monitor], logger=False, enable_progress_bar=False, enable_checkpointing=False
    )
    trainer.validate(module, zoo.loader(), verbose=False)
    assert not monitor.measurements


class Spy(pl.Callback):
    """Counts hooks at every moment of a batch."""

    def __init__(self):
        self.seen = {}

    def _look(self, trainer, module, moment):
        of = {**of_module(module), **of_optimizer(trainer.optimizers[0])}
        optimizer = of.pop("hooks/optimizer")
        modules = sum(count for path, count in of.items() if path.startswith("hooks/") and count)
        tensors = sum(len(h._backward_hooks or ()) for h in module.net.kept)
        self.seen[(trainer.fit_loop.total_batch_idx, moment)] = (modules, tensors, optimizer)

    def on_before_zero_grad(self, trainer, module, optimizer):
        self._look(trainer, module, "forward")

    def on_before_backward(self, trainer, module, loss):
        self._look(trainer, module, "backward")

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self._look(trainer, module, "update")


class Keeps(nn.Module):
    """Keeps its activations for us to look at."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, zoo.CLASSES)
        self.kept = []

    def forward(self, x):
        self.kept = [self.first(x)]
        self.kept.append(self.last(self.kept[0].relu()))
        return self.kept[1]


@pytest.mark.parametrize("quantities", ["standard", "light"])
def test_hooks_are_there_in_measured_steps_only(quantities):
    module, spy = zoo.Classifier(Keeps), Spy()
    monitor = SpectralMonitor(every_n_steps=3, quantities=quantities)
    fit(monitor, module, zoo.loader(count=12), callbacks=[spy], accumulate_grad_batches=2, max_epochs=1)
    assert monitor.latest.step == 6
    measured = {5, 11}  # the batches in which steps 3 and 6 are taken
    measured |= {1} if quantities == "standard" else set()  # that of step 1, where feature_drift starts
    watched = 7  # that of step 4, for gradients of step 3 that are not cleared
    for (batch, moment), (modules, tensors, optimizer) in spy.seen.items():
        on = batch in measured
        assert optimizer == 2 * (on or batch == watched), (batch, moment)
        assert bool(modules) == (on and quantities == "standard"), (batch, moment)
        assert bool(tensors) == (on and quantities == "standard"), (batch, moment)
    assert {batch for batch, _ in spy.seen} == set(range(12))


class Quits(zoo.Classifier):
    """Ends the first epoch before its fourth batch, from a hook that runs after the monitor's."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 3 and self.current_epoch == 0 else None

    def on_train_epoch_end(self):
        self.hooks_after_epoch = sum(n or 0 for path, n in of_module(self).items() if path.startswith("hooks/"))


@pytest.mark.parametrize(("accumulate", "steps"), [(1, [2, 4, 6, 8]), (2, [2, 4])])
def test_a_skipped_batch_leaves_nothing_armed(accumulate, steps):
    monitor, module = SpectralMonitor(every_n_steps=2), Quits()
    fit(monitor, module, max_epochs=2, accumulate_grad_batches=accumulate)
    assert [m.step for m in monitor.measurements] == steps
    assert all(m.summary["skipped_updates"] == 0 for m in monitor.measurements)
    assert module.hooks_after_epoch == 0


class Looks(pl.Callback):
    """Runs forwards of its own, as callbacks that show examples do."""

    def __init__(self, moment):
        setattr(self, moment, self._look)

    def _look(self, trainer, module, *rest):
        with torch.no_grad():
            module.net(torch.ones(3, 8))


MOMENTS = [
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
]


@pytest.mark.few(4)
@pytest.mark.parametrize("moment", [*MOMENTS, "another monitor"])
@pytest.mark.parametrize("first", [False, True], ids=["after the monitor", "before it"])
def test_forwards_of_others_are_not_measured(moment, first):
    found = []
    for other in (None, SpectralMonitor(every_n_steps=1) if moment == "another monitor" else Looks(moment)):
        torch.manual_seed(0)
        monitor = SpectralMonitor(every_n_steps=2, roles={"net.5": "readout"})
        callbacks = [monitor] if other is None else [other, monitor] if first else [monitor, other]
        zoo.fit(zoo.Classifier(), zoo.loader(), callbacks, recording())
        found.append([{k: v for k, v in m.scalars().items() if "overhead" not in k} for m in monitor.measurements])
    assert found[0] == found[1]


def test_what_is_nan_is_not_logged_and_says_why():
    monitor, logger = SpectralMonitor(every_n_steps=1), recording()
    fit(monitor, zoo.Classifier(lambda: nn.Sequential(nn.Linear(8, 4), nn.LSTM(4, 4))[:1]), logger=logger)
    assert math.isnan(monitor.latest.value("feature_change", "net.0.bias"))
    assert monitor.latest.why("feature_change", "net.0.bias")
    assert not any("feature_change/net.0.bias" in key for _, metrics in logger.spectral for key in metrics)


def test_no_other_warning_than_without():
    """Not of the monitor's, nor of what it calls."""
    found = []
    for monitors in ([], [SpectralMonitor(every_n_steps=1)]):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            zoo.fit(zoo.WithMetrics(), zoo.loader(), monitors, recording(), precision="bf16-mixed")
        found.append(sorted({(w.category.__name__, str(w.message)) for w in caught}))
    assert found[0] == found[1]
