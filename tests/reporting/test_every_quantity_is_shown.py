"""Whoever names a quantity finds it, in a chart of the page, of TensorBoard and of W&B, under its question."""

from __future__ import annotations

import json
import re

import pytest
import torch
import wandb
from torch.utils.tensorboard import SummaryWriter

from spectral_monitor import Measurement
from spectral_monitor.quantities import QUANTITIES
from spectral_monitor.reporting.content.history import History
from spectral_monitor.reporting.html.figures import escaped
from spectral_monitor.reporting.html.report import report
from spectral_monitor.reporting.tensorboard_sink.sink import TensorBoardSink
from spectral_monitor.reporting.wandb_sink.charts import charts
from tests.reporting import gpt
from tests.reporting.board import layouts, measurement, operators, read

WITH_WIDTH = "the same without width taken out, which cannot be compared across layers; its natural norm is shown"
IN_FROBENIUS = "Frobenius norms do not tell what an update does to outputs; the spectral norm is shown"
NOT_SHOWN = {
    "weight_norm": WITH_WIDTH,
    "update_norm": WITH_WIDTH,
    "weight_fro": IN_FROBENIUS,
    "update_fro": IN_FROBENIUS,
    "drift_fro_ratio": IN_FROBENIUS,
    "bfa": "the angle whose cosine, bfa_cos, is shown",
    "qk_gain_head": "the number of a head, which has no larger and smaller: it is in the file and the table",
}
"""Quantity -> why no chart shows it."""
QUESTIONS = {
    "Are attention logits in bounds?": "attention_logit_max attention_entropy attention_entropy_lowest attention_sink "
    "qk_gain qk_update",
    "How large and how noisy are gradients?": "noise_scale gradient_natural backward_rms gradient_change "
    "backward_speed",
    "Are features moving?": "feature_change feature_drift feature_rms feature_change_local feature_change_inherited "
    "feature_change_joint",
    "Is the network lazy, or does it learn features?": "linearity kernel_drift kernel_alignment kernel_change "
    "output_drift_features output_drift_readout output_drift_joint",
    "Do the backward and feature directions agree?": "bfa_cos dual_bfa_cos bfk_ratio bfk_peak bfk_guarantee "
    "dual_bfk_ratio contribution sensitivity",
    "Are the network's logits in bounds?": "log_z readout_row",
    "Can it be trained in 8 bits?": "underflow_inputs underflow_weights underflow_backward feature_kurtosis "
    "outlier_ratio",
    "What does Adam hold?": "adam_rms eps_share momentum_cos dead_rows",
    "Does weight decay set the pace?": "equilibrium update_angle radial decay_share",
    "Are updates low-rank?": "update_stable_rank weight_stable_rank input_stable_rank backward_stable_rank",
    "Does what the theorems assume hold?": "weight_cancellation feature_cancellation activation_ratio sample_share",
    "Are updates the right size?": "update_natural update_ratio",
    "Are weights the right size?": "weight_natural drift_ratio",
    "Is the output layer aligned?": "alignment update_alignment",
    "What did the corrector do?": "lr lr_multiplier",
}
LISTED = {key: question for question, keys in QUESTIONS.items() for key in keys.split()}
ANSWERED = {key: entry.question for key, entry in QUANTITIES.items() if entry.question}
SHOWN = [key for key in QUANTITIES if key not in NOT_SHOWN]


def alone(key, step=10):
    """A measurement of one quantity, and the sum of no others."""
    one = measurement(step, keys=(key,), banded=())
    return Measurement(step, one.layers, one.values, {})


def board(folder, key, *measurements):
    """Title of a category -> title of a chart -> tags it draws; and the words beside it."""
    with SummaryWriter(str(folder)) as writer:
        sink = TensorBoardSink(writer, heatmap_every=0, asked=[key])
        for one in measurements:
            sink.write(one)
        found = read(writer)
        tags = found.Tags()["scalars"]
        ((_, told),) = layouts(writer)
        (words,) = found.Tensors("spectral/what_charts_show/text_summary")
    drawn = {
        category.title: {
            chart.title: {tag for tag in tags if any(re.match(pattern, tag) for pattern in chart.multiline.tag)}
            for chart in category.chart
        }
        for category in told.category
    }
    return drawn, words.tensor_proto.string_val[0].decode()


def page(key, *measurements):
    """Question -> its figure; and all the text."""
    pytest.importorskip("plotly")
    text = report(measurements)
    data = json.loads(re.search(r"<script[^>]*>(\{.*?)</script>", text, re.DOTALL)[1])
    sections = re.findall(r'<section id="question-(\d+)"><h2>(.*?)</h2>', text)
    return {question: data["figures"][f"panel-{place}"] for place, question in sections}, text


def test_every_quantity_is_shown_or_said_why_not():
    assert set(ANSWERED) | set(NOT_SHOWN) == set(QUANTITIES)
    assert not set(ANSWERED) & set(NOT_SHOWN)
    assert ANSWERED.items() >= LISTED.items(), "a new one need not be listed here"
    assert set(ANSWERED.values()) == set(QUESTIONS)


@pytest.mark.parametrize("key", SHOWN)
def test_on_the_page(key):
    figures, text = page(key, alone(key), alone(key, 20))
    assert list(figures) == [ANSWERED[key]], "its question, and no other"
    (figure,) = figures.values()
    assert {trace["x"] for trace in figure["data"] if "meta" in trace} == {key}
    assert len([trace for trace in figure["data"] if "meta" in trace]) == 6, "a line for each matrix"
    (title,) = [note["text"] for note in figure["layout"]["annotations"]]
    words = re.sub(r"<[^>]*>", " ", title)
    words = " ".join(words.replace("&#37;", "%").replace("&gt;", ">").replace("&lt;", "<").split())
    entry = QUANTITIES[key]
    assert words.startswith(f"{entry.title} {key}")
    assert entry.unit == "ratio" or entry.unit in words
    assert all(f"{entry.title} %" in trace["hovertemplate"] for trace in figure["data"] if "meta" in trace)
    assert entry.meaning in words
    assert f"<dt>{escaped(entry.title)} ({key})</dt>" in text


@pytest.mark.parametrize("key", SHOWN)
def test_in_tensorboard(key, tmp_path):
    drawn, words = board(tmp_path, key, alone(key))
    assert list(drawn) == [ANSWERED[key]], "its category, and no other"
    (charts_,) = drawn.values()
    assert all(charts_.values()), "no empty chart"
    ours = {title: tags for title, tags in charts_.items() if any(tag.startswith(f"spectral_{key}/") for tag in tags)}
    (title,) = ours
    assert len([tag for tag in ours[title] if tag.startswith(f"spectral_{key}/")]) == 6
    entry = QUANTITIES[key]
    assert title.startswith(f"{entry.title} ({key}")
    assert entry.unit == "ratio" or entry.unit in title
    assert f"### {ANSWERED[key]}" in words
    assert "".join(entry.meaning.split()) in re.sub(r"<br>|\\|\s", "", words).replace("&gt;", ">").replace("&lt;", "<")


@pytest.mark.parametrize("key", SHOWN)
def test_in_the_charts_of_wandb(key):
    history = History()
    for step in (10, 20):
        history.add(alone(key, step))
    found = charts(history, [key])
    assert list(found) == [f"spectral/charts/{key}"]
    (chart,) = found.values()
    assert isinstance(chart, wandb.plot.CustomChart)
    assert chart.spec.string_fields["title"].startswith(f"{ANSWERED[key]} ({QUANTITIES[key].title}")
    assert len({row[1] for row in chart.table.data}) == 6


def test_of_wandb_those_that_nobody_named_have_one_chart_a_question():
    history = History()
    history.add(measurement(10, banded=()))
    assert len(charts(history)) == len(QUESTIONS)
    assert len(charts(history, list(QUANTITIES))) == len(SHOWN)


def test_a_share_of_which_all_is_zero_is_drawn_too():
    """It is what a healthy run shows, and has no logarithm."""
    history = History()
    one = alone("eps_share")
    one.values["eps_share"][:] = 0.0
    history.add(one)
    (chart,) = charts(history, ["eps_share"]).values()
    assert {row[2] for row in chart.table.data} == {0.0}


@pytest.mark.parametrize("key", [key for key in SHOWN if QUANTITIES[key].band is not None])
def test_a_band_is_what_healthy_says_and_is_on_the_page(key, tmp_path):
    entry = QUANTITIES[key]
    numbers = [float(number) for number in re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", f"{entry.healthy} {entry.range}")]
    limits = [limit for limit in entry.band if 0 < limit < float("inf")]
    assert limits
    assert set(limits) <= {*numbers, 1.0}
    figures, _ = page(key, alone(key), alone(key, 20))
    drawn = [trace for trace in figures[ANSWERED[key]]["data"] if "meta" not in trace and "y" in trace]
    near = [trace["y"] for trace in drawn if trace.get("name", "").startswith(("limit", "band"))]
    assert sorted({y for line in near for y in line}) == pytest.approx(sorted(limits), rel=1e-6)
    charts_ = board(tmp_path, key, alone(key))[0][ANSWERED[key]]
    assert any(f"(OK: {entry.limits})" in title for title in charts_)


def test_a_band_of_the_judge_comes_first():
    """Otherwise two bands would be told of one layer."""
    one = alone("attention_entropy")
    one.bands["attention_entropy"] = torch.tensor([[0.4, 0.8, 0.5]] * len(one.layers))
    figures, _ = page("attention_entropy", one)
    drawn = [trace for trace in figures[ANSWERED["attention_entropy"]]["data"] if "meta" not in trace]
    assert sorted(y for trace in drawn for y in trace["y"]) == pytest.approx([0.4, 0.8])


def test_in_a_deep_network_too_and_titles_can_be_read(tmp_path):
    one = gpt.measured(50)
    generator = torch.Generator().manual_seed(1)
    values = {key: torch.rand(len(gpt.LAYERS), generator=generator) for key in SHOWN}
    every = Measurement(50, one.layers, values, {}, bands=one.bands, states=one.states)
    with SummaryWriter(str(tmp_path)) as writer:
        TensorBoardSink(writer, heatmap_every=0, asked=SHOWN).write(every)
        ((_, told),) = layouts(writer)
    titles = {category.title: [chart.title for chart in category.chart] for category in told.category}
    assert set(titles) == set(QUESTIONS)
    for key in SHOWN:
        named = [title for title in titles[ANSWERED[key]] if f"({key}," in title or f"({key})" in title]
        assert len(named) == 2, key  # all layers, and the families
    assert max(len(title) for some in titles.values() for title in some) <= 80


def test_where_all_is_zero_the_axis_begins_at_zero_and_ends_above_the_limit():
    one = alone("underflow_backward")
    one.values["underflow_backward"][:] = 0.0
    figures, _ = page("underflow_backward", one)
    assert figures["Can it be trained in 8 bits?"]["layout"]["yaxis"]["range"] == pytest.approx([-0.0012, 0.06])


def test_charts_side_by_side_have_one_legend():
    """Of two quantities one may be known of so few layers that each would have a colour of its own."""
    keys = ("feature_change", "feature_change_local")
    one = measurement(10, of=operators([f"blocks.{i}.w" for i in range(16)]), keys=keys, banded=())
    one.values["feature_change_local"][12:] = float("nan")
    figures, _ = page("feature_change", one)
    lines = [trace for trace in figures["Are features moving?"]["data"] if "meta" in trace]
    colours = {key: {trace["line"]["color"] for trace in lines if trace["x"] == key} for key in keys}
    assert colours["feature_change"] == colours["feature_change_local"]
