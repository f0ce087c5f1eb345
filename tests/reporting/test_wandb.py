"""What a W&B run holds of a measured training: numbers, charts, verdicts, alerts, summary, config, profile."""

from __future__ import annotations

import csv
import getpass
import json
import math
import re
import socket
from collections import Counter
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
import wandb
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader

from spectral_monitor import SpectralMonitor, SpectralMonitorWarning
from spectral_monitor.condition import SpectralCondition, load_profile, save_profile
from spectral_monitor.condition.verdict import short
from spectral_monitor.messages import SpectralConditionWarning
from spectral_monitor.monitoring.settings import described
from spectral_monitor.reporting.content.essentials import essentials
from tests.noninterference import zoo
from tests.reporting.wandb_file import AXIS, RunFile, go_offline


@pytest.fixture(autouse=True)
def _offline(tmp_path, monkeypatch):
    go_offline(monkeypatch, tmp_path)
    yield
    wandb.finish()


class Faulty(pl.LightningModule):
    """The learning rate of ``net.2`` is 100 times that of the others, until after 20 steps."""

    def __init__(self):
        super().__init__()
        hidden = [module for _ in range(4) for module in (nn.Linear(32, 32), nn.ReLU())]
        self.net = nn.Sequential(*hidden, nn.Linear(32, 4))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        faulty = [{"params": self.net[2].parameters(), "lr": 0.1}]
        return torch.optim.Adam([*faulty, *({"params": self.net[i].parameters()} for i in (0, 4, 6, 8))], lr=1e-3)

    def on_train_batch_start(self, batch, batch_idx):
        if self.trainer.global_step == 20:
            self.trainer.optimizers[0].param_groups[0]["lr"] = 1e-3


def batches(count, width=32):
    generator = torch.Generator().manual_seed(1)
    made = [
        (torch.randn(16, width, generator=generator), torch.randint(4, (16,), generator=generator))
        for _ in range(count)
    ]
    return DataLoader(made, batch_size=None)


# ------------------------------------------------------------ one training: a fault, mended; charts at every 5th of 23


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """The monitor, what W&B holds, and where."""
    folder = tmp_path_factory.mktemp("faulty")
    with pytest.MonkeyPatch.context() as patch:
        go_offline(patch, folder)
        torch.manual_seed(0)
        monitor = SpectralMonitor(every_n_steps=2, heatmap_every=5)
        logger = WandbLogger(save_dir=folder, offline=True)
        with pytest.warns(SpectralConditionWarning, match=r"step 2: net\.2"):
            zoo.fit(Faulty(), batches(46), [monitor], logger)
        logger.experiment.finish()
        yield SimpleNamespace(monitor=monitor, file=RunFile(folder), folder=folder)


@pytest.mark.slow
def test_every_number_of_every_measurement_is_there_at_its_step(faulty):
    measured = faulty.monitor.measurements
    assert [m.step for m in measured] == list(range(2, 47, 2))
    wanted = {(m.step - 1, key): value for m in measured for key, value in essentials(m).items()}
    assert len(wanted) > 23 * 40
    assert faulty.file.numbers() == pytest.approx(wanted, rel=1e-7)


def test_a_measurement_takes_one_call_and_the_end_one_more(faulty):
    rows = faulty.file.rows
    assert [row["_step"] for row in rows] == list(range(len(rows)))
    ours = [row[AXIS] for row in rows if any(key.startswith("spectral/") for key in row)]
    assert ours == [*range(1, 46, 2), 45], "on the axis of Lightning's own metrics"
    theirs = [row[AXIS] for row in rows if "loss" in row]
    assert theirs == list(range(46)), "Lightning counts from 0"
    assert len(rows) == len(ours) + len(theirs)
    (last,) = [row for row in rows[-2:] if any(key.startswith("spectral/") for key in row)]
    assert not any(key.startswith("spectral/summary/") for key in last), "charts only"


def test_lightnings_own_axis_is_left_alone(faulty):
    everything = faulty.file.metrics["*"]
    assert everything.step_metric == AXIS
    assert everything.options.step_sync
    assert not everything.options.hidden
    assert not faulty.file.metrics[AXIS].options.hidden


def test_charts_are_in_the_row_of_every_fifth_measurement_and_of_the_end(faulty):
    charts = faulty.file.media("spectral/charts/")
    assert list(charts) == [5, 9, 19, 29, 39, 45]
    for at, shown in ((axis + 1, shown) for axis, shown in charts.items()):
        assert set(shown) == {
            f"spectral/charts/{quantity}_table"
            for quantity in (
                "update_natural",
                "feature_change",
                "weight_natural",
                "alignment",
                "update_stable_rank",
                "bfa_cos",
            )
        }
        points = {}
        for step, layer, value in shown["spectral/charts/update_natural_table"]["data"]:
            points.setdefault(layer, []).append((step, value))
        assert set(points) == {f"net.{i}" for i in (0, 2, 4, 6, 8)}, "biases are not shown"
        for layer, line in points.items():
            assert [step for step, _ in line] == list(range(2, at + 1, 2))
            wanted = [m.value("update_natural", layer) for m in faulty.monitor.measurements if m.step <= at]
            assert [value for _, value in line] == pytest.approx([math.log10(x) for x in wanted], abs=1e-5)
    assert list(faulty.file.media("spectral/heatmaps/")) == [5, 9, 19, 29, 39, 45]
    chart = faulty.file.config["_wandb/visualize/spectral/charts/update_natural"]
    title = chart["panel_config"]["stringSettings"]["title"]
    assert title == "Are updates the right size? (update size, RMS / RMS, log10)"


def test_the_table_of_verdicts_is_logged_with_the_pictures(faulty):
    tables = faulty.file.media("spectral/verdicts")
    assert list(tables) == [5, 9, 19, 29, 39]
    (verdict,) = next(m for m in faulty.monitor.measurements if m.step == 6).verdicts
    begin, end = (tables[step]["spectral/verdicts"] for step in (5, 39))
    (row,) = (dict(zip(begin["columns"], row, strict=True)) for row in begin["data"])
    wanted = {
        "step": 6,
        "layer": "net.2",
        "quantity": "update size",
        "value": pytest.approx(verdict.value),
        "low": pytest.approx(verdict.band[0]),
        "high": pytest.approx(verdict.band[1]),
        "vs. typical": pytest.approx(verdict.ratio),
        "for steps": 4,
        "cause": "lr_too_large",
        "what to do": verdict.sentence,
        "same cause": 1,
        "disturbs": 0,
    }
    assert begin["columns"] == list(wanted)
    assert row == wanted
    assert end["data"] == []


def test_alerts_when_a_violation_begins_and_ends(faulty):
    begin, end = faulty.file.alerts
    (verdict,) = next(m for m in faulty.monitor.measurements if m.step == 2).verdicts
    assert (begin.title, begin.level) == ("Spectral monitor: net.2 off", "WARN")
    seen = f"{verdict.quantity} {short(verdict.value)}, should be {verdict.should_be}"
    assert begin.text == f"step 2: net.2: {verdict.sentence}\n{seen}"
    assert (end.title, end.level) == ("Spectral monitor: net.2 healthy again", "INFO")
    assert end.text == "step 22: net.2 healthy again"
    assert begin.wait_duration == end.wait_duration == 600_000


def test_the_summary_says_what_matters_and_nothing_of_single_layers(faulty):
    ours = {key: value for key, value in faulty.file.summary.items() if key.startswith("spectral/")}
    worst = [m.summary["worst_layer_ratio"] for m in faulty.monitor.measurements]
    assert ours["spectral/summary/worst_layer_ratio"] == pytest.approx({"last": worst[-1], "max": max(worst)})
    assert worst[-1] != max(worst)
    assert ours["spectral/summary/violations"] == {"last": 0, "max": 1}
    assert ours["spectral/violating_layers"] == "none"
    assert ours["spectral/headline"] == "all 5 layers healthy"
    groups = {"/".join(key.split("/")[:2]) for key in ours} - {f"spectral/{key}" for key in ("charts", "heatmaps")}
    assert groups == {f"spectral/{key}" for key in ("summary", "verdicts", "violating_layers", "headline", "page")}
    assert not [key for key in faulty.file.summary if "/net." in key]


def test_the_page_is_logged_once_as_it_stands(faulty):
    pages = faulty.file.media("spectral/page")
    assert list(pages) == [45]
    text = pages[45]["spectral/page"].read_text()
    assert "All 5 layers healthy" in text
    assert "<script" in text


def test_settings_are_in_the_config_and_nothing_of_the_machine_anywhere(faulty):
    assert faulty.file.config["spectral_monitor"] == described("warn", SpectralCondition(), None)
    written = [row for row in faulty.file.rows if any(key.startswith("spectral/") for key in row)]
    tables = [path.read_text() for path in faulty.file.files.rglob("spectral/**/*.json")]
    alerts = [f"{alert.title} {alert.text}" for alert in faulty.file.alerts]
    text = "\n".join([json.dumps(written), json.dumps(faulty.file.config), *tables, *alerts])
    for secret in (str(faulty.folder), socket.gethostname(), getpass.getuser()):
        assert not re.search(rf"(?<!\w){re.escape(secret)}(?!\w)", text), secret


def test_the_profile_is_an_artifact(faulty, tmp_path):
    (artifact,) = [a for a in faulty.file.artifacts if a.type == "spectral-profile"]
    assert artifact.name == "spectral-profile"
    (entry,) = artifact.manifest.contents
    assert entry.path == "profile.json"
    save_profile(faulty.monitor.measurements, tmp_path / "own.json")
    assert load_profile(entry.local_path) == load_profile(tmp_path / "own.json")


# --------------------------------------------------------------------------------------------------------- long, beside


@pytest.mark.slow
def test_beside_other_loggers(tmp_path):
    monitor = SpectralMonitor(every_n_steps=1, mode="observe", heatmap_every=4)
    loggers = [TensorBoardLogger(tmp_path), WandbLogger(save_dir=tmp_path, offline=True), CSVLogger(tmp_path)]
    zoo.fit(Faulty(), batches(10), [monitor], loggers)
    loggers[1].experiment.finish()
    file, wanted = (
        RunFile(tmp_path),
        {(m.step - 1, k): v for m in monitor.measurements for k, v in essentials(m).items()},
    )
    assert file.numbers() == pytest.approx(wanted, rel=1e-7)
    assert [row["_step"] for row in file.rows] == list(range(len(file.rows)))
    assert [row[AXIS] for row in file.rows if "loss" in row] == list(range(10))
    key = "spectral_update_ratio/net.2"
    events = EventAccumulator(loggers[0].log_dir).Reload()
    assert [event.step for event in events.Scalars(key)] == list(range(10)), "as Lightning's own"
    with open(f"{loggers[2].log_dir}/metrics.csv") as sheet:
        assert [int(row["step"]) for row in csv.DictReader(sheet) if row[key]] == list(range(10))


class Small(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 4)

    training_step = Faulty.training_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.slow
def test_two_thousand_steps(tmp_path):
    monitor = SpectralMonitor(every_n_steps=10, quantities="light", mode="observe", heatmap_every=150)
    logger = WandbLogger(save_dir=tmp_path, offline=True)
    zoo.fit(Small(), batches(200, 4), [monitor], logger, max_epochs=10, log_every_n_steps=5)
    logger.experiment.finish()
    file = RunFile(tmp_path)
    assert [row["_step"] for row in file.rows] == list(range(len(file.rows)))
    assert [row[AXIS] for row in file.rows if "loss" in row] == list(range(4, 2000, 5))
    ours = [row[AXIS] for row in file.rows if "spectral/summary/violations" in row]
    assert ours == list(range(9, 2000, 10))
    assert set(file.numbers()) == {(m.step - 1, key) for m in monitor.measurements for key in essentials(m)}
    assert list(file.media("spectral/charts/")) == [29, 99, 1499, 1999]
    last = file.media("spectral/charts/")[1999]["spectral/charts/update_natural_table"]["data"]
    assert max(Counter(layer for _, layer, _ in last).values()) <= 129


def test_a_run_that_is_gone_on_with(tmp_path):
    files = []
    for part, epochs in (("first", 1), ("second", 2)):
        monitor = SpectralMonitor(every_n_steps=2, mode="observe")
        logger = WandbLogger(save_dir=tmp_path / part, offline=True, id="again", resume="allow")
        saved = ModelCheckpoint(tmp_path, filename="last", enable_version_counter=False)
        path = tmp_path / "last.ckpt" if part == "second" else None
        (tmp_path / part).mkdir()
        zoo.fit(
            Faulty(), batches(6), [monitor, saved], logger, max_epochs=epochs, enable_checkpointing=True, ckpt_path=path
        )
        assert logger.experiment.id == "again"
        logger.experiment.finish()
        files.append(RunFile(tmp_path / part))
    steps = [sorted({step for step, _ in file.numbers()}) for file in files]
    assert steps == [[1, 3, 5], [7, 9, 11]]
    assert [[row["_step"] for row in file.rows] for file in files] == [list(range(len(file.rows))) for file in files]


class Finish(pl.Callback):
    """Somebody calls ``wandb.finish()`` in the middle of training."""

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 3:
            trainer.logger.experiment.finish()


class Quiet(Faulty):
    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])


def test_a_finished_run_costs_a_warning(tmp_path):
    monitor, logger = SpectralMonitor(every_n_steps=1, mode="observe"), WandbLogger(save_dir=tmp_path, offline=True)
    with pytest.warns(SpectralMonitorWarning, match=r"WandbSink did not take the measurement \(.*finished") as caught:
        trainer = zoo.fit(Quiet(), batches(6), [Finish(), monitor], logger)
    assert trainer.global_step == len(monitor.measurements) == 6
    assert len([warning for warning in caught if warning.category is SpectralMonitorWarning]) == 1
    assert sorted({step for step, _ in RunFile(tmp_path).numbers()}) == [0, 1]
