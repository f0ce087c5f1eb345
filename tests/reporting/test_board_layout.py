"""The tab Custom Scalars: which charts there are, and that each finds the tags that belong there, and no others."""

from __future__ import annotations

import re

import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

from spectral_monitor import Measurement
from spectral_monitor.quantities import QUANTITIES
from spectral_monitor.reporting.content.panels import PANELS
from spectral_monitor.reporting.tensorboard_sink.sink import TensorBoardSink
from tests.reporting import gpt
from tests.reporting.board import layers, layouts, measurement, operators, read, scalars

ROOT = "model.transformer.h.7.mlp.c_fc"


@pytest.fixture
def writer(tmp_path):
    with SummaryWriter(str(tmp_path / "run")) as writer:
        yield writer


def drawn(chart, tags):
    """Tags that the plugin finds for a chart: it matches expressions at the beginning."""
    pattern = "|".join(f"({tag})" for tag in chart.multiline.tag)
    return {tag for tag in tags if re.match(pattern, tag)}


def written(writer, *measurements):
    """Scalars' tags, and categories with the tags of each of their charts."""
    sink = TensorBoardSink(writer, heatmap_every=0)
    for one in measurements:
        sink.write(one)
    tags = set(read(writer).Tags()["scalars"])
    _, told = layouts(writer)[-1]
    return tags, {
        category.title: {chart.title: drawn(chart, tags) for chart in category.chart} for category in told.category
    }


def test_the_first_title_fits_its_chart(writer):
    """A longer one takes two lines, and the chart is drawn over the second."""
    _, found = written(writer, measurement())
    title, *_ = found[PANELS[0].question]
    assert "limits" in title
    assert len(title) <= 57


def test_in_a_small_network_a_chart_has_every_layer(writer):
    tags, found = written(writer, measurement())
    names = ("tokens", "blocks.0.w+q", "blocks.0.mlp", "blocks.1.w+q", "blocks.1.mlp", "a (b)|c/d")
    answered = [panel for panel in PANELS if not panel.by_name]  # nobody has named any
    assert list(found) == [panel.question for panel in answered]
    for panel in answered:
        shown = set().union(*found[panel.question].values())
        expected = {f"spectral/summary/{key}" for key in panel.summaries} & tags
        for key in panel.quantities:
            expected |= {tag for tag in tags if tag in {f"spectral_{key}/{name}" for name in names}}
        if panel is PANELS[0]:
            expected |= {f"spectral_vs_typical_log2/{name}" for name in (*names, "limits/low", "limits/high")}
        assert shown == expected
    assert set().union(*(some for charts in found.values() for some in charts.values())) < tags


def test_the_first_chart_answers_the_question(writer):
    _, found = written(writer, measurement())
    first = {question: next(iter(charts.values())) for question, charts in found.items()}
    answers = dict(zip((panel.question for panel in PANELS), PANELS, strict=True))
    for question, shown in first.items():
        panel = answers[question]
        key = "vs_typical_log2" if panel is PANELS[0] else panel.quantities[0]
        stem = f"spectral/summary/{panel.summaries[0]}" if panel.by_summary else f"spectral_{key}/"
        assert all(tag.startswith(stem) for tag in shown), question
    assert first["Is the output layer aligned?"] == {"spectral/summary/final_layer_alignment"}


def faulty(step=60):
    """A GPT of 75 matrices of which one is a hundred times too large."""
    one = gpt.measured(step, roots=[gpt.root(value=10.0)])
    keys = ("feature_drift", "drift_ratio", "alignment", "bfa_cos", "update_stable_rank")
    more = {key: torch.rand(len(gpt.LAYERS)) for key in keys}
    summary = {"violations": 1.0, "worst_layer_ratio": 100.0, "loss_change": -0.1, "final_layer_alignment": 0.5}
    return Measurement(
        step, one.layers, {**one.values, **more}, summary, one.verdicts, flags={ROOT: 1.0}, bands=one.bands,
        states=one.states,
    )  # fmt: skip


def test_a_deep_network_has_at_most_400_tags_and_40_charts(writer):
    tags, found = written(writer, gpt.measured(50), faulty())
    assert len(tags) == 231 <= 400
    assert sum(map(len, found.values())) == 28 <= 40
    for charts in found.values():
        assert all(charts.values())
        assert all(len(title) <= 80 for title in charts)
        assert not any("transformer" in title for title in charts), "what all layers share says nothing"


def test_an_outlier_of_a_hundred_times_is_not_cut_off(writer):
    """TensorBoard's own scaling goes from the 5th to the 95th percentile of all points of a chart."""
    sink = TensorBoardSink(writer, heatmap_every=0)
    for step in range(10, 70, 10):
        sink.write(faulty(step))
    points = scalars(writer)
    tags = {tag for _, tag in points}
    ((_, told), *_) = layouts(writer)
    chart = told.category[0].chart[0]
    shown = sorted(value for (_, tag), value in points.items() if tag in drawn(chart, tags))
    assert shown[int(0.95 * (len(shown) - 1))] == pytest.approx(6.64, abs=0.01) == shown[-1]
    family = next(chart for chart in told.category[0].chart if chart.title.endswith(": h.*.mlp.c_fc"))
    shown = sorted(value for (_, tag), value in points.items() if tag in drawn(family, tags))
    assert shown[int(0.95 * (len(shown) - 1))] == shown[-1] == pytest.approx(6.64, abs=0.01)
    single = next(chart for chart in told.category[0].chart if chart.title.endswith("single layers"))
    assert f"spectral_vs_typical_log2/{ROOT}" in drawn(single, tags)


def test_a_question_that_nothing_was_measured_for_is_not_asked(writer):
    told = measurement(keys=("weight_natural", "drift_ratio", "lr", "lr_multiplier"), banded=())
    _, found = written(writer, Measurement(10, told.layers, told.values, {}))
    assert list(found) == ["Are weights the right size?", "What did the corrector do?"]
    assert [len(charts) for charts in found.values()] == [2, 1]
    told.values["lr_multiplier"][:] = 1.0
    _, found = written(writer, Measurement(20, operators(("x", "y")), {"lr_multiplier": torch.ones(2)} | {
        "weight_natural": torch.ones(2)}, {}))  # fmt: skip
    assert list(found) == ["Are weights the right size?"], "nothing was corrected"


def test_the_layout_is_written_again_when_there_is_more_to_show_and_only_then(writer):
    sink = TensorBoardSink(writer)
    keys = [key for key in QUANTITIES if key != "feature_drift"]
    for step, some in ((1, keys), (2, keys), (3, tuple(QUANTITIES)), (4, keys), (5, tuple(QUANTITIES))):
        sink.write(measurement(step, keys=some))
    found = layouts(writer)
    assert [step for step, _ in found] == [1, 3]
    counts = [sum(len(category.chart) for category in told.category) for _, told in found]
    assert counts[1] == counts[0] + 1
    sink.write(measurement(6, of=operators(("x", "y"))))
    step, last = layouts(writer)[-1]
    assert step == 6
    tags = set(read(writer).Tags()["scalars"])
    assert drawn(last.category[1].chart[0], tags) == {"spectral_feature_change/x", "spectral_feature_change/y"}


def test_biases_and_gains_are_not_drawn_with_matrices(writer):
    of = layers(("net.0", "net.1", "net.2"), ("operator", "vector", "operator"))
    tags, found = written(writer, measurement(of=of))
    assert not {tag for tag in tags if tag.endswith("net.1")}
    shown = set().union(*found["Are updates the right size?"].values())
    assert {"spectral_update_ratio/net.0", "spectral_update_ratio/net.2"} <= shown


@pytest.mark.parametrize(("kinds", "closed"), [(1, 0), (12, 6)])
def test_of_many_charts_only_the_first_category_is_open(writer, kinds, closed):
    names = [f"blocks.{i}.{kind}" for i in range(3) for kind in range(kinds)]
    TensorBoardSink(writer).write(measurement(of=operators(names)))
    ((_, told),) = layouts(writer)
    assert [category.closed for category in told.category] == [False] * (7 - closed) + [True] * closed
