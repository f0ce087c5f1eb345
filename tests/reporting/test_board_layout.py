"""The tab Custom Scalars: which charts there are, and that each finds the tags that belong there, and no others."""

from __future__ import annotations

import math
import re

import pytest
import torch
from board import layers, layouts, measurement, operators, read, scalars
from torch.utils.tensorboard import SummaryWriter

from spectral_monitor import Measurement
from spectral_monitor.quantities import QUANTITIES
from spectral_monitor.reporting.layout import margins
from spectral_monitor.reporting.panels import PANELS
from spectral_monitor.reporting.tensorboard import TensorBoardSink


@pytest.fixture
def writer(tmp_path):
    with SummaryWriter(str(tmp_path / "run")) as writer:
        yield writer


def test_margins_by_hand():
    of = operators(("n.0", "n.1", "n.2", "head"))
    values = {"update_natural": torch.tensor([0.2, 0.1, 0.05, 0.0])}
    bands = {"update_natural": torch.tensor([[0.05, 0.8, 0.1], [0.05, 0.8, 0.1], [0.0625, 1.6, 0.2], [0.1, 0.4, 0.2]])}
    kind, head = margins(Measurement(5, of, values, {}, bands=bands))
    # Of n.*: 2 below the upper limit, 1 above the lower one, and log2(0.05 / 0.0625) = -0.32 below it: the third.
    assert (kind.quantity, kind.kind) == ("update_natural", "n.*")
    assert [kind.value, kind.low, kind.high] == pytest.approx([-2, math.log2(0.3125), 3], abs=1e-6)
    assert [head.value, head.low, head.high] == pytest.approx([-24, -1, 1], abs=1e-6)  # nothing at all


@pytest.mark.parametrize(
    ("band", "value", "expected"),
    [
        ((0.0, 0.5, math.nan), 0.25, (-2, -3, -1)),  # a limit but no reference: the value itself
        ((0.0, 0.5, math.nan), 0.9, (math.log2(0.9), math.log2(0.9) - 1, -1)),
        ((0.25, math.inf, 1.0), 1.0, (0, -2, 2)),
        ((0.25, math.inf, 1.0), 0.125, (-3, -2, 2)),
        ((0.25, math.inf, 1.0), 16.0, (4, -2, 5)),
        ((0.0, math.inf, 1.0), 1.0, None),  # nothing that could be violated
        ((math.nan, math.nan, math.nan), 1.0, None),
        ((0.25, 4.0, 1.0), math.nan, None),
        ((0.25, 4.0, 1.0), 1e38, (24, -2, 2)),
    ],
)
def test_limits_that_are_missing(band, value, expected):
    bands = {"update_natural": torch.tensor([band])}
    told = margins(Measurement(5, operators(("a",)), {"update_natural": torch.tensor([value])}, {}, bands=bands))
    found = [(margin.value, margin.low, margin.high) for margin in told]
    assert found == ([] if expected is None else [pytest.approx(expected, abs=1e-6)])


@pytest.mark.parametrize("seed", range(20))
def test_a_line_is_outside_the_shade_where_a_layer_is_outside_its_band_and_only_there(seed):
    generator = torch.Generator().manual_seed(seed)
    of = operators([f"{kind}.{i}" for kind in "abc" for i in range(4)])
    wide = 1 if seed < 15 else 12
    values = {"weight_natural": torch.exp2(wide * 2 * torch.randn(12, generator=generator))}
    values["weight_natural"][torch.rand(12, generator=generator) < 0.1] = 0.0
    low, high = (torch.exp2(sign * wide * (1 + 3 * torch.rand(12, generator=generator))) for sign in (-1, 1))
    low[torch.rand(12, generator=generator) < 0.3] = 0.0
    high[torch.rand(12, generator=generator) < 0.3] = math.inf
    told = margins(
        Measurement(5, of, values, {}, bands={"weight_natural": torch.stack([low, high, torch.ones(12)], 1)})
    )
    outside = (values["weight_natural"] < low) | (values["weight_natural"] > high)
    expected = {kind: bool(outside[4 * k : 4 * k + 4].any()) for k, kind in enumerate("abc")}
    found = {margin.kind[0]: not margin.low <= margin.value <= margin.high for margin in told}
    assert found == expected
    assert all(math.isfinite(number) for margin in told for number in margin.scalars().values())


def test_the_three_lines_of_a_margin_have_the_same_steps(writer):
    """TensorBoard draws nothing where they have not."""
    sink = TensorBoardSink(writer)
    for step in range(10, 60, 10):
        told = measurement(step, banded=("update_natural", "weight_natural"))
        told.bands["weight_natural"][:, 0] = 0.0
        if step == 30:
            told.bands["update_natural"][:] = math.nan
        sink.write(told)
    steps = {}
    for step, tag in scalars(writer):
        if tag.startswith("spectral/margin/"):
            steps.setdefault(tag, []).append(step)
    assert set(steps) == {
        f"spectral/margin/{quantity}/{kind}{limit}"
        for quantity in ("update_natural", "weight_natural")
        for kind in ("blocks.*.w+q", "blocks.*.mlp", "others")
        for limit in ("", "/low", "/high")
    }
    for tag, found in steps.items():
        assert sorted(found) == ([10, 20, 40, 50] if "update_natural" in tag else [10, 20, 30, 40, 50]), tag


def drawn(chart, tags):
    """Tags that the plugin finds for a chart: it matches expressions at the beginning, names of margins in full."""
    if chart.HasField("margin"):
        return {tag for series in chart.margin.series for tag in (series.value, series.lower, series.upper)}
    pattern = "|".join(f"({tag})" for tag in chart.multiline.tag)
    return {tag for tag in tags if re.match(pattern, tag)}


def test_every_question_has_charts_of_just_the_tags_that_belong_there(writer):
    sink = TensorBoardSink(writer)
    sink.write(measurement())
    tags = set(read(writer).Tags()["scalars"])
    ((_, told),) = layouts(writer)
    assert [category.title for category in told.category] == [panel.question for panel in PANELS]
    kinds = [("blocks.0.w+q", "blocks.1.w+q"), ("blocks.0.mlp", "blocks.1.mlp"), ("tokens", "a (b)|c/d")]
    for category, panel in zip(told.category, PANELS, strict=True):
        expected = [{f"spectral/{key}/{name}" for name in kind} for key in panel.quantities for kind in kinds]
        for kind in ("blocks.*.w+q", "blocks.*.mlp", "others"):
            tag = f"spectral/margin/update_natural/{kind}"
            expected += [{tag, f"{tag}/low", f"{tag}/high"}] if "update_natural" in panel.quantities else []
        together = {"loss_change", "loss_change_predicted"}
        expected += [{f"spectral/summary/{key}"} for key in panel.summaries if key not in together]
        expected += [{f"spectral/summary/{key}" for key in together}] if together & set(panel.summaries) else []
        found = [drawn(chart, tags) for chart in category.chart]
        assert sorted(map(sorted, found)) == sorted(map(sorted, expected))
        assert all(some <= tags for some in found)
        assert len({chart.title for chart in category.chart}) == len(category.chart)


def test_a_question_that_nothing_was_measured_for_is_not_asked(writer):
    sink = TensorBoardSink(writer)
    keys = ("weight_natural", "drift_ratio", "lr", "bfa_cos")
    told = measurement(keys=keys, banded=())
    told.values["bfa_cos"][:] = math.nan
    told.values["lr"][:5] = math.nan
    sink.write(Measurement(10, told.layers, told.values, {}))
    ((_, found),) = layouts(writer)
    assert [category.title for category in found.category] == [
        "Are weights the right size?",
        "What did the corrector do?",
    ]
    assert [len(category.chart) for category in found.category] == [6, 1]


def test_the_layout_is_written_again_when_there_is_more_to_show_and_only_then(writer):
    sink = TensorBoardSink(writer)
    keys = [key for key in QUANTITIES if key != "feature_drift"]
    for step, some in ((1, keys), (2, keys), (3, tuple(QUANTITIES)), (4, keys), (5, tuple(QUANTITIES))):
        sink.write(measurement(step, keys=some))
    found = layouts(writer)
    assert [step for step, _ in found] == [1, 3]
    counts = [sum(len(category.chart) for category in told.category) for _, told in found]
    assert counts[1] == counts[0] + 3
    other = operators(("x", "y"))
    sink.write(measurement(6, of=other))
    step, last = layouts(writer)[-1]
    assert step == 6
    assert drawn(last.category[1].chart[0], set(read(writer).Tags()["scalars"])) == {
        "spectral/feature_change/x",
        "spectral/feature_change/y",
    }


def test_biases_and_gains_of_the_same_kind_are_not_drawn_with_matrices(writer):
    of = layers(("net.0", "net.1", "net.2"), ("operator", "vector", "operator"))
    TensorBoardSink(writer).write(measurement(of=of))
    tags = set(read(writer).Tags()["scalars"])
    assert "spectral/update_natural/net.1" in tags
    ((_, told),) = layouts(writer)
    found = set.union(*(drawn(chart, tags) for category in told.category for chart in category.chart))
    assert "spectral/update_natural/net.0" in found
    assert not {tag for tag in found if tag.endswith("net.1")}


@pytest.mark.parametrize(("kinds", "closed"), [(1, 0), (6, 6)])
def test_of_many_charts_only_the_first_category_is_open(writer, kinds, closed):
    names = [f"blocks.{i}.{kind}" for i in range(3) for kind in range(kinds)]
    TensorBoardSink(writer).write(measurement(of=operators(names)))
    ((_, told),) = layouts(writer)
    assert [category.closed for category in told.category] == [False] * (7 - closed) + [True] * closed
