"""The W&B sink by itself: panels of a deep model, alerts and how often, runs and measurements of other kinds."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import wandb
from torch import nn

from spectral_monitor import LayerInfo, Measurement, SpectralProbe
from spectral_monitor.condition import Verdict
from spectral_monitor.measurement import LayerState
from spectral_monitor.reporting.content import essentials as essentials_module
from spectral_monitor.reporting.content.essentials import essentials
from spectral_monitor.reporting.content.history import History
from spectral_monitor.reporting.wandb_sink import sink as sink_module
from spectral_monitor.reporting.wandb_sink.charts import lines
from spectral_monitor.reporting.wandb_sink.sink import WandbSink
from tests.one_step import training_step
from tests.reporting import gpt
from tests.reporting.wandb_file import AXIS, RunFile, go_offline, offline_run

OVERLAID = {f"spectral_{key}" for key in essentials_module.OVERLAID} | {"spectral/summary/violations"}


@pytest.fixture(autouse=True)
def _offline(tmp_path, monkeypatch):
    go_offline(monkeypatch, tmp_path)
    yield
    wandb.finish()


# ----------------------------------------------------------------------------------------------------- a hundred layers


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(16, 16) for _ in range(99)), nn.Linear(16, 4)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.relu(layer(x)) / 10
        return self.head(x)


@pytest.fixture(scope="module")
def deep():
    """Two measurements of a hundred layers."""
    torch.manual_seed(0)
    model, x, y = Deep(), torch.randn(16, 16), torch.randint(4, (16,))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    probe = SpectralProbe(model, optimizer, every_n_steps=1)
    for _ in range(2):
        with training_step(probe, optimizer):
            nn.functional.cross_entropy(model(x), y).backward()
    return list(probe.measurements)


def verdict(layer, **changed):
    return replace(
        Verdict(layer, "update_natural", 0.1, (0.001, 0.01), 50.0, 4, 3, "lr_too_large", "lower it"), **changed
    )


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("like_lightning", [True, False])
def test_a_hundred_layers_make_some_twenty_panels(tmp_path, deep, like_lightning):
    with offline_run(tmp_path, like_lightning) as run:
        sink = WandbSink(run, heatmap_every=2)
        sink.write(deep[0])
        sink.write(replace(deep[1], verdicts=(verdict("layers.7"),), flags={"layers.7": 1.0}))
        sink.close()
    file = RunFile(tmp_path)
    logged = {key for _, key in file.numbers()}
    of_one = {key for key in logged if key.endswith("/layers.7")}
    assert logged == set(essentials(deep[0])) | set(essentials(deep[1])) | of_one
    assert 8 <= len(of_one) <= 10, "it has had a verdict"
    assert len(logged) < 120
    panels = file.panels()
    assert panels & logged == OVERLAID, "the same in every network"
    assert panels - logged == {
        "spectral/verdicts",
        "spectral/page",
        *(f"spectral/charts/{key}" for key in ("update_natural", "feature_change", "weight_natural", "alignment")),
        *(f"spectral/charts/{key}" for key in ("update_stable_rank", "bfa_cos")),
        *(f"spectral/heatmaps/{key}" for key in ("update_natural", "feature_change", "bfa_cos")),
    }
    assert not [key for key in file.summary if key.count("/") == 2 and "layers." in key]


def test_of_very_many_keys_only_some_are_defined_one_by_one(tmp_path, deep, monkeypatch):
    monkeypatch.setattr(sink_module, "MAX_KEYS_ONE_BY_ONE", 500)
    with offline_run(tmp_path) as run:
        WandbSink(run, heatmap_every=0, log="all").write(deep[0])
    file = RunFile(tmp_path)
    assert len(file.numbers()) > 3000
    assert 500 < len(file.metrics) < 600
    assert file.panels() == OVERLAID


def test_of_many_layers_kinds_are_drawn_and_those_outside():
    layers = tuple(LayerInfo(f"net.{i}", "operator", 8, 8, (8, 8)) for i in range(19))
    history = History()
    for step, last in ((5, 8.0), (10, 0.0)):
        values = {
            "update_natural": torch.tensor([2.0] * 9 + [8.0] * 9 + [last]),
            "bfa_cos": torch.tensor([-0.5] * 9 + [0.5] * 9 + [0.19]),
            "alignment": torch.tensor([math.nan] * 18 + [0.25]),
        }
        history.add(Measurement(step, layers, values, {}, verdicts=(verdict("net.18"), verdict("net.3"))))
    rows = range(19)
    drawn = lines(history, "update_natural", rows)
    assert list(drawn) == ["net.* (mean of 19)", "net.18", "net.3"]
    assert drawn["net.* (mean of 19)"] == [(5, pytest.approx((2**9 * 8**10) ** (1 / 19), rel=1e-5)), (10, 0.0)]
    assert drawn["net.18"] == [(5, 8.0), (10, 0.0)]
    assert drawn["net.3"] == [(5, 2.0), (10, 2.0)]
    assert lines(history, "bfa_cos", rows)["net.* (mean of 19)"] == [(5, 0.01), (10, 0.01)]
    assert lines(history, "alignment", rows) == {"net.18": [(5, 0.25), (10, 0.25)]}
    assert list(lines(history, "update_natural", range(16))) == [f"net.{i}" for i in range(16)]
    assert lines(history, "feature_change", rows) == {}


# --------------------------------------------------------------------------------------------------------------- alerts


def measured(step, *outside, layers=("a", "b", "c")):
    infos = tuple(LayerInfo(name, "operator", 8, 8, (8, 8)) for name in layers)
    values = {key: torch.full((len(layers),), 0.5) for key in ("weight_natural", "update_natural", "lr")}
    verdicts = tuple(verdict(layer) for layer in outside)
    states = dict.fromkeys(layers, LayerState("healthy"))
    return Measurement(step, infos, values, {"violations": float(len(outside))}, verdicts, states=states)


@pytest.fixture
def clock(monkeypatch):
    """Seconds, as the sink sees them."""
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(sink_module, "monotonic", lambda: now.seconds)
    return now


def told(file):
    return [(alert.level, alert.title.removeprefix("Spectral monitor: ")) for alert in file.alerts]


def test_each_root_that_begins_is_one_alert_and_so_are_all_layers_that_end_together(tmp_path):
    with offline_run(tmp_path) as run:
        sink = WandbSink(run)
        for step, outside in enumerate(["", "abc", "abc", "b", "b", ""]):
            sink.write(measured(step, *outside))
    file = RunFile(tmp_path)
    assert told(file) == [
        *(("WARN", f"{layer} off") for layer in "abc"),
        ("INFO", "a and 1 more healthy again"),
        ("INFO", "b healthy again"),
    ]
    seen = "update_natural 0.1, should be 0.001 .. 0.01, for 4 steps"
    assert [alert.text for alert in file.alerts[:3]] == [f"step 1: {layer}: lower it\n{seen}" for layer in "abc"]
    assert file.alerts[3].text == "step 3: a, c healthy again"


def test_of_a_deep_network_a_root_is_one_alert_whatever_follows_from_it(tmp_path):
    """And it sends none again while it stays, though its worst layer and what follows from it change."""
    more = gpt.root(gpt.ROOTS[1], value=5.4)
    with offline_run(tmp_path) as run:
        sink = WandbSink(run, heatmap_every=1)
        sink.write(gpt.measured(50))
        sink.write(gpt.measured(60, [gpt.root(consequences=gpt.FOLLOWERS)], gpt.FOLLOWERS))
        sink.write(gpt.measured(70, [gpt.root(*gpt.ROOTS, consequences=gpt.FOLLOWERS[:3])], gpt.FOLLOWERS[:3]))
        sink.write(gpt.measured(80, [gpt.root(*reversed(gpt.ROOTS))]))
        assert run.summary["spectral/violating_layers"] == f"{gpt.ROOTS[1]}, {gpt.ROOTS[0]}"
        sink.write(gpt.measured(90, [gpt.root(gpt.ROOTS[0]), more]))
        assert run.summary["spectral/headline"] == "2 of 75 layers off: h.7.mlp.c_fc, h.3.attn.v_proj; 73 healthy"
        sink.write(gpt.measured(100))
    file = RunFile(tmp_path)
    begin, end = file.alerts
    assert begin.title == f"Spectral monitor: {gpt.ROOTS[0]} off"
    told = f"step 60: h.7.mlp.c_fc: {gpt.SENTENCE}. 19 other layers are disturbed by it."
    assert begin.text.splitlines()[0] == told
    assert end.text == f"step 100: {gpt.ROOTS[1]}, {gpt.ROOTS[0]} healthy again"
    (row,) = file.media("spectral/verdicts")[60]["spectral/verdicts"]["data"]
    assert row[-2:] == [1, 19]


def test_two_roots_are_two_alerts(tmp_path):
    with offline_run(tmp_path) as run:
        roots = [gpt.root(consequences=gpt.FOLLOWERS), gpt.root(gpt.ROOTS[1], value=5.4)]
        WandbSink(run, heatmap_every=1).write(gpt.measured(60, roots, gpt.FOLLOWERS))
    file = RunFile(tmp_path)
    assert [alert.title for alert in file.alerts] == [f"Spectral monitor: {layer} off" for layer in gpt.ROOTS]
    assert len(file.media("spectral/verdicts")[60]["spectral/verdicts"]["data"]) == 2


def test_a_verdict_on_the_network_is_told_and_nothing_is_healthy_again_that_nobody_judged(tmp_path):
    lost = dict.fromkeys(gpt.MATRICES, "NaN")
    with offline_run(tmp_path) as run:
        sink = WandbSink(run, heatmap_every=1)
        sink.write(gpt.measured(60, [gpt.root(consequences=gpt.FOLLOWERS)], gpt.FOLLOWERS))
        sink.write(gpt.measured(70, [gpt.of_network()], not_judged=lost))
        sink.write(gpt.measured(80, not_judged=lost))
        sink.write(gpt.measured(90, not_judged={gpt.ROOTS[0]: "frozen"}))
    file = RunFile(tmp_path)
    begin, diverged, end = file.alerts
    assert begin.title.endswith(f"{gpt.ROOTS[0]} off")
    assert (diverged.title, diverged.text) == (
        "Spectral monitor: diverged",
        "step 70: diverged at step 40: the loss is NaN",
    )
    assert end.text == "step 90: the network (diverged) healthy again"
    (row,) = file.media("spectral/verdicts")[70]["spectral/verdicts"]["data"]
    assert row[1:7] == ["network", "", None, None, None, None]


def test_a_layer_that_comes_and_goes_is_told_of_every_ten_minutes(tmp_path, clock):
    with offline_run(tmp_path) as run:
        sink = WandbSink(run, heatmap_every=0)
        for step in range(100):  # half a minute each
            clock.seconds = 30.0 * step
            sink.write(measured(step, *("a" if step % 2 else "")))
    begun = [alert for alert in RunFile(tmp_path).alerts if alert.level == "WARN"]
    assert [alert.text.split(":")[0] for alert in begun] == [f"step {step}" for step in range(1, 100, 20)]
    assert len(told(RunFile(tmp_path))) == 2 * len(begun), "of each it is said that it is over"


def test_a_run_sends_thirty_alerts_at_most(tmp_path):
    names = tuple(f"block.{i}" for i in range(40))
    with offline_run(tmp_path) as run:
        sink = WandbSink(run, heatmap_every=0)
        for step, name in enumerate(names):
            sink.write(measured(step, name, layers=names))
    alerts = RunFile(tmp_path).alerts
    assert len(alerts) == 30
    assert ["No more alerts" in alert.text for alert in alerts] == [False] * 29 + [True]


def test_titles_are_short_enough_and_texts_not_endless(tmp_path):
    names = tuple(f"model.{'deep.' * 20}{i}" for i in range(40))
    with offline_run(tmp_path) as run:
        root = verdict(names[0], layers=names)
        sink = WandbSink(run)
        sink.write(replace(measured(1, layers=names), verdicts=(root,)))
        sink.write(measured(2, layers=names))
    begin, end = RunFile(tmp_path).alerts
    for alert, what in ((begin, "off"), (end, "healthy again")):
        assert len(alert.title) < 64
        assert alert.title.endswith(f"deep.0 and 39 more {what}")
    assert begin.text.startswith("step 1: each of deep.* x40: lower it")
    assert "and 30 more healthy again" in end.text


# ------------------------------------------------------------------------------------------------ other runs and errors


def test_the_summary_names_what_is_off_and_has_the_most_there_ever_was(tmp_path):
    with offline_run(tmp_path) as run:
        sink = WandbSink(run)
        for step, outside in enumerate(("a", "abc", ""), start=1):
            sink.write(measured(step, *outside))
            assert run.summary["spectral/violating_layers"] == (", ".join(outside) or "none")
    summary = RunFile(tmp_path).summary["spectral/summary/violations"]
    assert summary == {"last": 0, "max": 3}


def test_the_end_says_how_far_it_has_come(tmp_path):
    """A violation that goes on is in the table as it is in the end; nothing is shown twice, nothing without reason."""
    with offline_run(tmp_path) as run:
        sink = WandbSink(run, heatmap_every=0)
        sink.close()
        sink.write(measured(1))
        sink.write(measured(2, "a"))
        sink.write(replace(measured(3), verdicts=(verdict("a", steps=99),)))
        sink.close()
        sink.close()
    file = RunFile(tmp_path)
    tables = file.media("spectral/verdicts")
    assert {step: table["spectral/verdicts"]["data"][0][7] for step, table in tables.items()} == {3: 99}
    assert [row[AXIS] for row in file.rows] == [1, 2, 3, 3]
    assert not [key for row in file.rows for key in row if key.startswith(("spectral/charts", "spectral/heatmaps"))]
    assert [a.type for a in file.artifacts].count("spectral-profile") == 1


def test_what_a_user_has_named_has_a_chart_of_its_own_and_what_is_not_measured_has_none(tmp_path):
    names = {"momentum_cos": 0.4, "eps_share": 0.0}
    told = replace(measured(1), values=measured(1).values | {key: torch.full((3,), x) for key, x in names.items()})
    with offline_run(tmp_path) as run:
        sink = WandbSink(run, heatmap_every=1, asked=[*names, "noise_scale"])
        sink.write(told)
    (row,) = RunFile(tmp_path).rows
    found = {key.removeprefix("spectral/charts/") for key in row if key.startswith("spectral/charts/")}
    assert found == {f"{key}_table" for key in (*names, "update_natural", "weight_natural")}


def test_too_little_for_a_profile_is_no_error(tmp_path):
    with offline_run(tmp_path) as run:
        sink = WandbSink(run)
        sink.write(replace(measured(1), values={"weight_natural": torch.ones(3)}))
        sink.close()
    file = RunFile(tmp_path)
    assert len(file.rows) == 2
    assert not [a for a in file.artifacts if a.type == "spectral-profile"]


def test_numbers_are_logged_even_if_charts_fail(tmp_path, monkeypatch):
    def broken(history):
        raise MemoryError("too large")

    monkeypatch.setattr(sink_module, "pictures", broken)
    with offline_run(tmp_path) as run:
        sink = WandbSink(run, heatmap_every=1)
        with pytest.raises(MemoryError, match="too large"):
            sink.write(measured(1))
    (row,) = RunFile(tmp_path).rows
    assert {key: row[key] for key in essentials(measured(1))} == essentials(measured(1))
    assert "spectral/charts/update_natural_table" in row


def test_a_disabled_run_takes_everything(tmp_path):
    run = wandb.init(mode="disabled")
    sink = WandbSink(run, {"mode": "warn"}, heatmap_every=1)
    for step in (1, 2):
        sink.write(measured(step, "a"))
    sink.close()
    run.finish()


def test_random_numbers_are_left_alone(tmp_path):
    def states():
        numpy = np.random.get_state()[1].tolist()  # noqa: NPY002
        return random.getstate(), numpy, torch.get_rng_state().tolist()

    with offline_run(tmp_path) as run:
        sink, before = WandbSink(run, heatmap_every=1), states()
        sink.write(measured(1, "a"))
        sink.close()
        assert states() == before
