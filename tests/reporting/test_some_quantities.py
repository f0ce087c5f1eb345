"""Runs whose measurements do not all have the same quantities: everything that shows them."""

from __future__ import annotations

import json
import math

import pytest
import torch
import wandb
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from spectral_monitor import SpectralCondition, SpectralProbe
from spectral_monitor.quantities import QUANTITIES
from spectral_monitor.reporting import JSONLinesSink
from spectral_monitor.reporting.content.essentials import essentials
from spectral_monitor.reporting.content.history import History
from spectral_monitor.reporting.files.jsonlines import read_measurements
from spectral_monitor.reporting.heatmap import heatmap
from spectral_monitor.reporting.html.report import report
from spectral_monitor.reporting.tensorboard_sink.sink import TensorBoardSink
from spectral_monitor.reporting.text.markdown import verdict_markdown
from spectral_monitor.reporting.text.table import measurement_table
from spectral_monitor.reporting.wandb_sink.charts import lines
from spectral_monitor.reporting.wandb_sink.sink import WandbSink
from tests.one_step import training_step
from tests.reporting.board import images, layouts, measurement, scalars, texts
from tests.reporting.wandb_file import RunFile, go_offline, offline_run

EVERY = {"light": 2, "standard": 5}
STEPS = 25
STANDARD = [key for key, row in QUANTITIES.items() if row.tier == "standard"]


def train(*sinks):
    """A layer whose learning rate is far too high from the start; steps 5, 15 and 25 have features only."""
    torch.manual_seed(0)
    hidden = [layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.ReLU())]
    net = nn.Sequential(*hidden, nn.Linear(16, 2))
    others = [p for name, p in net.named_parameters() if not name.startswith("2.")]
    groups = [{"params": net[2].parameters(), "lr": 1e-3}, {"params": others}]
    optimizer = torch.optim.Adam(groups, lr=1e-5)
    condition = SpectralCondition(persistence=2)
    given = {"condition": condition, "mode": "observe", "sinks": list(sinks)}
    probe = SpectralProbe(net, optimizer, every_n_steps=EVERY, **given)
    for _ in range(STEPS):
        with training_step(probe, optimizer):
            nn.functional.mse_loss(net(torch.randn(16, 16)), torch.ones(16, 2)).backward()
    probe.close()
    return probe


@pytest.fixture(scope="module")
def run():
    return list(train().measurements)


def test_a_verdict_stands_where_nothing_is_judged(run):
    found = {m.step: [v.layer for v in m.roots] for m in run}
    assert found == {step: ["2"] for step in sorted({*range(2, 26, 2), *range(5, 26, 5)})}
    assert all(m.summary["violations"] == 1 for m in run)
    assert [m.flags for m in run] == [{"2": 1.0}] * len(run)
    assert {m.step: set(m.bands) for m in run}[15] == set()
    assert "update_natural" in run[-2].bands


def test_tables_have_what_was_measured(run):
    last = run[-1]
    assert set(last.values) == set(STANDARD)
    text = measurement_table(last)
    assert text.startswith("spectral monitor, step 25: 1 of 5 layers off: 2; 4 healthy"), "as it was at step 24"
    assert "|dW| nat" not in text
    assert "dh/h" in text
    assert "its learning rate is 0.001, that of the other layers 1e-05, at which they" in " ".join(text.split())
    assert "update_natural" not in measurement_table(run[-2])
    assert verdict_markdown(last).startswith("**Step 25: 1 of 5 layers off: 2; 4 healthy")


def test_a_file_of_lines_gives_back_the_same(run, tmp_path):
    sink = JSONLinesSink(tmp_path / "run.jsonl")
    for one in run:
        sink.write(one)
    found = list(read_measurements(sink.path))
    assert [(m.step, list(m.values), m.reasons, m.flags) for m in found] == [
        (m.step, list(m.values), m.reasons, m.flags) for m in run
    ]
    for ours, theirs in zip(found, run, strict=True):
        for key, values in ours.values.items():
            torch.testing.assert_close(values, theirs.values[key], rtol=1e-5, atol=0, equal_nan=True)
    changed = [len(json.loads(line)["reasons"]) for line in sink.path.read_text().splitlines()[1:]]
    assert all(m.reasons for m in run), "all have some"
    drift = sum("feature_drift" in m.values for m in run)
    assert sum(size > 0 for size in changed[3:]) < drift, "they do not come and go with the quantities"


def test_each_quantity_has_a_history_of_its_own():
    history = History(columns=8)
    for step in range(1, 1001):
        keys = ("update_natural", "feature_change") if step % 100 == 0 else ("update_natural",)
        history.add(measurement(step, keys=keys))
    assert history.of("feature_change").steps == [100, 300, 500, 700, 900, 1000]
    assert history.of("update_natural").steps == history.steps
    assert len(history.steps) <= 9
    assert history.of("bfa").values("bfa").shape == (len(history.layers), 0)
    drawn = lines(history, "feature_change", [0, 1])
    assert [step for step, _ in drawn["tokens"]] == [100, 300, 500, 700, 900, 1000]
    assert lines(history, "bfa", [0, 1]) == {}
    picture, plain = heatmap(history, "feature_change"), History(columns=8)
    for step in range(100, 1001, 100):
        plain.add(measurement(step, keys=("update_natural", "feature_change")))
    assert (picture == heatmap(plain, "feature_change")).all(), "no grey columns for steps that had something else"
    assert heatmap(history, "bfa") is None


def test_other_layers_are_other_layers_for_all():
    history = History()
    history.add(measurement(1, keys=("lr", "bfa")))
    history.add(measurement(2, of=measurement(1).layers[:2], keys=("lr",)))
    assert history.of("lr").steps == [2]
    assert history.of("bfa").steps == []
    assert history.of("bfa").values("bfa").shape == (2, 0)


def test_tensorboard(run, tmp_path):
    with SummaryWriter(str(tmp_path)) as writer:
        sink = TensorBoardSink(writer, heatmap_every=4, histograms=True)
        for one in run:
            sink.write(one)
        sink.close()
        found = scalars(writer)
        assert set(found) == {(one.step, tag) for one in run for tag in essentials(one)}
        assert {step for step, tag in found if tag.startswith("spectral_vs_typical_log2/")} == set(range(2, 26, 2))
        assert [step for step, _ in texts(writer)] == [2, 24], (
            "nobody is healthy again at steps of features, and the end is told of the last that was judged"
        )
        assert [step for step, _ in layouts(writer)] == [2, 5], "anew when there is more to show"
        assert set(images(writer)) == {"update_natural", "feature_change", "bfa_cos"}


def test_wandb(tmp_path, monkeypatch):
    go_offline(monkeypatch, tmp_path)
    with offline_run(tmp_path) as logged:
        train(WandbSink(logged, heatmap_every=4))
    wandb.finish()
    file = RunFile(tmp_path)
    assert [alert.title for alert in file.alerts] == ["Spectral monitor: 2 off"]
    steps = {row["trainer/global_step"] for row in file.rows if "spectral_feature_change/0" in row}
    assert steps == {5, 10, 15, 20, 25}
    kinds = [record.type for record in file.artifacts]
    assert "spectral-profile" in kinds, "it is of the steps that have all it takes"


def test_the_report_answers_by_the_last_step_that_was_judged(run):
    pytest.importorskip("plotly")
    page = report(run)
    assert "1 of 5 layers off: 2; 4 healthy" in page
    assert "All layers at step 24" in page
    assert "The rest of the page shows step 24, the last that could be judged" in page
    assert "Not measured:" not in page
    alignment = run[-1].summary["final_layer_alignment"]
    assert math.isfinite(alignment)
    assert f"<span>final layer alignment {alignment:.2f}</span>" in page
    calm = [measurement(10, banded=()), measurement(20, keys=("feature_rms",), banded=())]
    assert "All 6 layers healthy" in report(calm)
