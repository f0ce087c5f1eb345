"""What a sweep makes of its points: verdicts, what is left out and why, the table and the picture."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch

from spectral_monitor import LayerInfo, Measurement
from spectral_monitor.fitting.power_law import Fit
from spectral_monitor.parametrization.prediction import _untied_positions
from spectral_monitor.scaling import MUP
from spectral_monitor.scaling.sweeps.point import Point, RunKey, SweepConfig
from spectral_monitor.scaling.sweeps.result import evaluated
from spectral_monitor.scaling.sweeps.slope import Slope
from spectral_monitor.scaling.sweeps.sweep import sweep
from tests.scaling.sweeping import Known, Noisy, noise, ones

WIDTHS = (64, 128, 256, 512)
KEY = "update_natural"


def layers(width, count):
    return tuple(LayerInfo(f"net.{i}", "operator", width, 8, (width, 8)) for i in range(count))


def found(values, *, seeds=1, failures=None, infos=layers, recipe=None, keys=(KEY,)):
    """A result of made-up values: ``values[seed][layer][width]``, the same of every quantity."""
    recipe = recipe or SweepConfig(Known, ones, 1, keys)
    points = []
    for seed in range(seeds):
        for i, width in enumerate(WIDTHS):
            column = torch.tensor([row[i] for row in values[seed]], dtype=torch.float64)
            m = Measurement(1, infos(width, len(column)), dict.fromkeys(keys, column), {}, reasons={"*/net.9": "so"})
            key = RunKey(width, None, seed)
            failure = (failures or {}).get((width, seed), "")
            points.append(Point(key, (m,), (1.0,), failure, _untied_positions(m.layers)))
    return evaluated(recipe, [point.key for point in points], points, "width", 1)


def power(s, factor=1.0):
    return [factor * width**s for width in WIDTHS]


@pytest.mark.parametrize(
    ("low", "high", "predicted", "verdict", "sentence"),
    [
        (-0.05, 0.09, math.nan, "flat", "flat"),
        (0.4, 0.6, math.nan, "grows", "grows like width^0.50"),
        (-1.2, -0.8, math.nan, "vanishes", "vanishes like width^-1.00"),
        (0.05, 0.15, math.nan, "unclear", "unclear: try more seeds"),
        (-0.2, 0.2, math.nan, "unclear", "unclear, but it may be flat: try more seeds"),
        (0.95, 1.05, 1.0, "as predicted", "as predicted"),
        (-0.55, -0.45, -0.5, "as predicted", "as predicted"),
        (0.4, 0.6, 0.0, "not as predicted", "not as predicted: grows like width^0.50"),
        (-0.05, 0.05, 1.0, "not as predicted", "not as predicted: flat"),
        (0.8, 1.2, 1.0, "unclear", "unclear, but it fits the prediction: try more seeds"),
        (0.8, 0.95, 1.0, "unclear", "unclear: try more seeds"),
    ],
)
def test_verdicts(low, high, predicted, verdict, sentence):
    fit = Fit((low + high) / 2, low, high, (0, 1), "seeds")
    slope = Slope("a", KEY, "width", None, WIDTHS, (1.0,) * 4, (1.0,) * 4, (1.0,) * 4, fit, predicted)
    assert (slope.verdict, slope.sentence) == (verdict, sentence)


def test_offenders_come_first():
    result = found([[power(0), power(-0.5), power(0.01), power(1)]])
    assert [slope.verdict for slope in result.slopes] == ["flat", "vanishes", "flat", "grows"]
    first, titles, *rows, foot, one = result.table().splitlines()
    assert first == (
        "sweep over width 64 .. 512, 1 seed, step 1: 2 of 4 flat, 2 off: net.3 update_natural grows like width^1.00, "
        "net.1 update_natural vanishes like width^-0.50"
    )
    assert " ".join(titles.split()) == "layer quantity width 64 128 256 512 slope 95% interval verdict"
    assert [row.split()[0] for row in rows] == ["net.3", "net.1", "net.0", "net.2"]
    assert rows[0].split()[1:] == [
        KEY,
        "64.0",
        "128",
        "256",
        "512",
        "+1.00",
        "+1.00",
        "..",
        "+1.00",
        *["grows", "like", "width^1.00"],
    ]
    assert foot.startswith("slope: s in value ~ width^s")
    assert one.startswith("one seed: intervals come from the residuals")


def test_with_predictions():
    """All of these layers read 8 inputs; muP predicts a flat update."""
    recipe = SweepConfig(Known, ones, 1, [KEY], parametrization=MUP, optimizer="adam", lr=0.1)
    result = found([[power(0), power(0.5), power(-0.02)]], recipe=recipe)
    assert [slope.verdict for slope in result.slopes] == ["as predicted", "not as predicted", "as predicted"]
    first, titles, row, *_ = result.table().splitlines()
    assert first == (
        "sweep over width 64 .. 512, 1 seed, step 1: 2 of 3 as predicted (muP, adam), 1 off: net.1 update_natural "
        "grows like width^0.50 (predicted: flat)"
    )
    assert "predicted" in titles
    assert row.startswith("net.1")
    assert row.endswith("+0.00  not as predicted: grows like width^0.50")


def test_diverged_points_are_left_out():
    rows = [[power(0)], [power(0.2)]]
    rows[0][0][3] = 1e9  # it would be a slope
    result = found(rows, seeds=2, failures={(512, 0): "the loss is nan at step 4"})
    (slope,) = result.slopes
    assert result.excluded == ("width 512, seed 0: the loss is nan at step 4",)
    assert slope.fit.slope == pytest.approx(0.1, abs=1e-6)
    assert slope.values[3] == pytest.approx(512**0.2)
    assert result.table().splitlines()[-2:] == ["left out:", "  width 512, seed 0: the loss is nan at step 4"]


def test_never_a_slope_through_two_points():
    failures = {(width, 0): "the loss is inf at step 2" for width in (256, 512)}
    result = found([[power(1)]], failures=failures)
    assert result.slopes[0].fit.reason == "values at only 2 sizes, a slope needs 3"
    assert math.isnan(result.slopes[0].fit.slope)
    assert "0 of 1 flat, 1 without a slope, none off" in result.table()
    assert "no slope: values at only 2 sizes" in result.table()
    every = found([[power(1)]], failures={(width, 0): "the loss is inf at step 2" for width in WIDTHS})
    assert every.table().splitlines()[0].endswith("no slope, because all points are left out")
    assert not every.slopes


@pytest.mark.parametrize(("value", "why"), [(0.0, "0"), (math.nan, "nan"), (math.inf, "inf")])
def test_values_without_a_logarithm(value, why):
    row = power(-1)
    row[2] = value
    (slope,) = found([[row]]).slopes
    assert slope.fit.slope == pytest.approx(-1)
    assert slope.excluded == (f"width 256: {why}",)
    assert math.isnan(slope.values[2])
    two = found([[row], [power(-1)]], seeds=2).slopes[0]
    assert two.excluded == (f"width 256, seed 0: {why}",)
    assert two.values[2] == pytest.approx(1 / 256)


def test_a_seed_with_too_few_values():
    row = [1.0, math.nan, math.nan, 9.0]
    (slope,) = found([[power(1)], [row]], seeds=2).slopes
    assert slope.fit.slope == pytest.approx(1)
    assert (slope.fit.seeds, slope.fit.how) == ((0,), "residuals")
    assert slope.excluded[-1] == "seed 1: values at too few widths"
    assert slope.values == pytest.approx(power(1))


def test_nothing_applies():
    infos = lambda width, count: (LayerInfo("net.9", "operator", width, 8, (width, 8)),)  # noqa: E731
    (slope,) = found([[[math.nan] * 4]], infos=infos).slopes
    assert (slope.verdict, slope.sentence, slope.excluded) == ("no slope", "no slope: so", ())


def test_signs():
    mixed, negative = [1.0, -2.0, 4.0, 8.0], [-x for x in power(0.5)]
    slopes = found([[mixed, negative]]).slopes
    assert slopes[0].fit.reason == "it is positive at some points and negative at others"
    assert slopes[1].fit.slope == pytest.approx(0.5)
    assert slopes[1].values == pytest.approx(negative)
    other = found([[power(0)], [[-x for x in power(0)]]], seeds=2).slopes[0]
    assert other.fit.reason == "it is positive at some points and negative at others"


def test_networks_that_are_the_same():
    result = found([[power(1)]], infos=lambda width, count: layers(min(width, 256), count))
    assert result.excluded == ("width 512: all shapes are as at width 256",)
    assert math.isnan(result.slopes[0].values[3])
    assert result.slopes[0].fit.slope == pytest.approx(1)


def test_layers_that_do_not_change():
    def infos(width, count):
        fixed, clipped = LayerInfo("a", "operator", 8, 8, (8, 8)), min(width, 256)
        return (fixed, LayerInfo("b", "operator", clipped, 8, (clipped, 8)), *layers(width, 1))

    fixed, clipped, grows = found([[power(1)] * 3], infos=infos).slopes
    assert fixed.note == "its shape does not change with the width"
    assert clipped.note == "of one shape at widths 256 and 512"
    assert grows.note == ""
    assert fixed.fit.slope == pytest.approx(1)


def test_a_layer_that_is_not_everywhere():
    result = found([[power(1), power(1)]], infos=lambda width, count: layers(width, count if width > 64 else 1))
    assert [slope.layer for slope in result.slopes] == ["net.0", "net.1"]
    assert result.slopes[1].excluded == ("width 64: there is no such layer",)


def test_biases_are_left_out():
    result = sweep(Noisy, noise, widths=(4, 8, 16), seeds=1, steps=1, progress=False)
    assert {slope.layer for slope in result.slopes} == {"read", "blocks.0", "head"}
    assert any(info.role == "vector" for info in result.points[0].layers)


def test_rows():
    rows = found([[power(1)]]).to_rows()
    assert rows == [
        {
            "layer": "net.0",
            "quantity": KEY,
            **{f"width_{width}": pytest.approx(width) for width in WIDTHS},
            "slope": pytest.approx(1),
            "low": pytest.approx(1),
            "high": pytest.approx(1),
            "interval": "residuals",
            "predicted": pytest.approx(math.nan, nan_ok=True),
            "verdict": "grows",
            "sentence": "grows like width^1.00",
            "excluded": "",
            "note": "",
        }
    ]


# ----------------------------------------------------------------------------------------------------------- picture


def panels(figure):
    return [axis for axis in figure.axes if axis.axison]


def curves(axis):
    return {tuple(line.get_xdata()): line for line in axis.get_lines()}


def test_the_picture_shows_the_values():
    recipe = SweepConfig(Known, ones, 1, [KEY, "weight_natural"], parametrization=MUP, optimizer="adam", lr=0.1)
    rows = [[power(0, f), power(0.5, f), [-x for x in power(0.2, f)], [math.nan] * 4] for f in (1.0, 4.0)]
    result = found(rows, seeds=2, recipe=recipe, keys=recipe.quantities)
    figure = result.figure()
    assert [axis.get_title() for axis in panels(figure)] == ["weight_natural", KEY]
    axis = panels(figure)[1]
    lines = [line for line in axis.get_lines() if line.get_marker() == "o"]
    np.testing.assert_allclose(
        [line.get_ydata() for line in lines], [power(0, 2), power(0.5, 2), power(0.2, 2)], rtol=1e-6
    )
    assert {tuple(line.get_xdata()) for line in lines} == {WIDTHS}
    assert axis.get_xscale() == axis.get_yscale() == "log"
    assert [text.get_text() for text in axis.get_xticklabels()] == ["64", "128", "256", "512"]
    widths = [line.get_linewidth() for line in lines]
    assert widths[1] == widths[2] > widths[0]  # those that are off
    bands = [collection.get_paths()[0].vertices for collection in axis.collections]
    assert bands[0][:, 1].min() == pytest.approx(1)
    assert bands[0][:, 1].max() == pytest.approx(4)
    dashed = [line for line in axis.get_lines() if line.get_marker() != "o"]
    assert len(dashed) == 1  # all are predicted flat
    assert dashed[0].get_ydata()[0] == pytest.approx(dashed[0].get_ydata()[1])


def test_the_legend_lies_beside_the_panels():
    rows = [[power(i / 40) for i in range(20)]]
    figure = found(rows).figure()
    figure.draw_without_rendering()
    legend = figure.legends[0]
    assert [text.get_text() for text in legend.get_texts()] == [f"net.{i}" for i in range(20)]
    box = legend.get_window_extent()
    assert all(axis.get_window_extent().x1 <= box.x0 for axis in panels(figure))
    assert 0 <= box.y0 < box.y1 <= figure.bbox.height


def test_the_picture_of_nothing():
    failures = {(width, 0): "the loss is inf at step 2" for width in WIDTHS}
    figure = found([[power(1)]], failures=failures).figure()
    assert [text.get_text() for axis in panels(figure) for text in axis.texts] == ["no values"]


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match="pip install"):
        found([[power(1)]]).figure()
    assert found([[power(1)]]).table()


# ---------------------------------------------------------------------------------------------------------- progress


def test_progress(capsys):
    kwargs = {"widths": (4, 8, 16), "seeds": 1, "steps": 1}
    sweep(Known, ones, **kwargs)
    assert "3/3" in capsys.readouterr().err
    sweep(Known, ones, progress=False, **kwargs)
    assert capsys.readouterr() == ("", "")
