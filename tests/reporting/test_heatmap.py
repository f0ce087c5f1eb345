"""What is to be seen in the pictures of layer by step: colours are read back as values."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
import torch

from spectral_monitor import LayerInfo, Measurement, Verdict
from spectral_monitor.reporting import heatmap as module
from spectral_monitor.reporting.content.history import History
from spectral_monitor.reporting.heatmap import RED, can_draw, heatmap

GREY = [204, 204, 204]
NAN = math.nan


def history(quantity, columns, bands=None, names=None, outside=(), role="operator"):
    """One measurement for each column of values; ``bands`` are low, high and reference of every layer."""
    told = History()
    names = names or [f"net.{i}" for i in range(len(columns[0]))]
    layers = tuple(LayerInfo(name, role, 64, 64, (64, 64)) for name in names)
    verdicts = tuple(Verdict(name, quantity, 9.0, (0.1, 1.0), 9.0, 1, 3, "unknown", "") for name in outside)
    known = {} if bands is None else {quantity: torch.tensor([bands] * len(layers))}
    for k, column in enumerate(columns):
        told.add(Measurement(10 * (k + 1), layers, {quantity: torch.tensor(column)}, {}, verdicts, bands=known))
    return told


class Picture:
    """The two framed areas of a picture, values on the left and the colour bar on the right."""

    def __init__(self, pixels, rows, columns):
        assert pixels.dtype == np.uint8
        black = (pixels == 0).all(2)
        (across,) = np.nonzero(black.sum(0) > 0.5 * black.shape[0])  # the upright lines of both frames
        assert len(across) == 4, across
        down = np.nonzero(black[:, across[0]])[0]
        assert (np.diff(down) == 1).all()
        top, bottom = down[0] + 1, down[-1]
        self.left = across[0] + 1
        self.names = pixels[top:bottom, : across[0]]
        self.cells = pixels[top:bottom, across[0] + 1 : across[1]]
        self.bar = pixels[top:bottom, across[2] + 1 : across[3]]
        self.rows, self.columns = rows, columns
        self.pixels = pixels

    def cell(self, row, column):
        """The colour of a cell, which is the same all over it."""
        (high, wide), (rows, columns) = self.cells.shape[:2], (self.rows, self.columns)
        part = self.cells[
            math.ceil(row * high / rows) : (row + 1) * high // rows,
            math.ceil(column * wide / columns) : (column + 1) * wide // columns,
        ]
        assert (part == part[0, 0]).all()
        return part[0, 0].tolist()

    def place(self, row, column):
        """Where on the colour bar that colour is, 0 at its bottom and 1 at its top."""
        (found,) = np.nonzero((self.bar[:, 2] == self.cell(row, column)).all(1))
        assert len(found), f"the colour of {row}, {column} is not on the bar"
        return 1 - (found.mean() + 0.5) / len(self.bar)

    def limits(self):
        """Places of the black lines across the bar."""
        (found,) = np.nonzero((self.bar[2:-2] == 0).all((1, 2)))
        lines = np.split(found, np.nonzero(np.diff(found) > 1)[0] + 1) if len(found) else []
        return [1 - (line.mean() + 2.5) / len(self.bar) for line in lines]

    def named_red(self):
        """Rows beside which there is a red mark."""
        red = (self.names == RED).all(2)
        high = len(red) / self.rows
        return [i for i in range(self.rows) if red[int((i + 0.5) * high)].any()]


def picture(told, quantity):
    pixels = heatmap(told, quantity)
    return Picture(pixels, len(told.layers), len(told.steps))


LEVEL = 1 / 65 / 2 + 1e-2
"""Half a colour, and a pixel or two."""


def test_what_is_held_against_a_reference_is_shown_as_powers_of_two_around_it():
    columns = [[0.1, 0.2, 0.05], [0.1, 0.8, 0.0125]]  # 1, 2 and 1/2 times 0.1, then 1, 8 and 1/8 times
    shown = picture(history("update_natural", columns, (0.0125, 0.8, 0.1)), "update_natural")
    # The limits are at 8 and 1/8, and there is half as much again beyond them: 2 ** 4.5.
    for row, powers in enumerate(([0, 0], [1, 3], [-1, -3])):
        for column, power in enumerate(powers):
            assert shown.place(row, column) == pytest.approx(0.5 + power / 9, abs=LEVEL)
    assert shown.limits() == pytest.approx([0.5 + 3 / 9, 0.5 - 3 / 9], abs=LEVEL)
    red, _, blue = zip(shown.cell(1, 1), shown.cell(2, 1), strict=True)
    assert red[0] > red[1]  # above its share is red
    assert blue[0] < blue[1]
    neutral = shown.cell(0, 0)
    assert max(neutral) - min(neutral) <= 2


def test_the_bar_reaches_as_far_as_the_values():
    shown = picture(history("update_natural", [[0.1, 0.1 * 2**10]], (0.05, 0.2, 0.1)), "update_natural")
    assert shown.place(1, 0) == pytest.approx(1, abs=2 * LEVEL)
    assert shown.limits() == pytest.approx([0.5 + 1 / 20, 0.5 - 1 / 20], abs=LEVEL)


def test_limits_beyond_all_values_are_on_the_bar():
    limits = picture(history("update_natural", [[0.1, 0.1]], (1e-7, 1e5, 0.1)), "update_natural").limits()
    assert limits == pytest.approx([0.5 + 0.5 / 1.5, 0.5 - 0.5 / 1.5], abs=LEVEL)


def test_nothing_at_all_is_the_smallest_and_what_was_not_measured_is_grey():
    shown = picture(history("update_natural", [[0.1, 0.0, 0.1], [0.1, 0.1, NAN]], (0.05, 0.2, 0.1)), "update_natural")
    assert shown.place(1, 0) == pytest.approx(0, abs=2 * LEVEL)
    assert shown.cell(2, 1) == GREY
    assert shown.cell(2, 0) != GREY


def test_where_there_is_no_reference_yet_it_is_grey():
    told = history("update_natural", [[0.1, 0.1]], None)
    told.add(history("update_natural", [[0.1, 0.2]], (0.05, 0.2, 0.1)).measurements[0])
    shown = picture(told, "update_natural")
    assert [shown.cell(0, 0), shown.cell(1, 0)] == [GREY, GREY]
    assert GREY not in [shown.cell(0, 1), shown.cell(1, 1)]


def test_without_a_reference_the_scale_is_logarithmic_between_powers_of_ten():
    shown = picture(history("feature_change", [[1e-3, 1e-2], [0.1, 10**-1.5]]), "feature_change")
    for (row, column), place in {(0, 0): 0, (1, 0): 0.5, (0, 1): 1, (1, 1): 0.75}.items():
        assert shown.place(row, column) == pytest.approx(place, abs=2 * LEVEL)


def test_a_tiny_value_does_not_take_all_the_colours():
    shown = picture(history("feature_change", [[1e-30, 1e-2, 1.0]]), "feature_change")
    assert shown.place(0, 0) == pytest.approx(0, abs=2 * LEVEL)
    assert shown.place(1, 0) == pytest.approx(4 / 6, abs=LEVEL)


def test_cosines_are_shown_as_they_are():
    shown = picture(history("bfa_cos", [[-1.0, 0.0, 0.5, 1.0]]), "bfa_cos")
    places = [shown.place(row, 0) for row in range(4)]
    assert places == pytest.approx([0, 0.5, 0.75, 1], abs=2 * LEVEL)


def test_what_is_written_stands_where_it_belongs(monkeypatch):
    """Steps under their columns, names beside their rows, numbers beside their colours."""
    labels, draw = [], module._written
    monkeypatch.setattr(module, "_written", lambda some, high: labels.extend(some) or draw(some, high))
    shown = picture(history("update_natural", [[0.1, 0.4, 1.6, 0.025]] * 20, (0.0125, 0.8, 0.1)), "update_natural")
    high, wide = shown.cells.shape[:2]
    for row, ratio in enumerate(("1", "4", "16", "1/4")):
        (name,) = (label for label in labels if label.text == f"net.{row}")
        assert name.y - module.ABOVE == pytest.approx((row + 0.5) * high / 4, abs=1)
        (number,) = (label for label in labels if label.text == ratio)
        assert 1 - (number.y - module.ABOVE) / high == pytest.approx(shown.place(row, 0), abs=LEVEL)
    steps = {
        int(label.text): label.x - shown.left
        for label in labels
        if label.y > module.ABOVE + high and label.text[0] != "o"
    }
    assert {10, 200} <= set(steps)
    assert len(steps) == 8
    for step, x in steps.items():
        assert x == pytest.approx((step / 10 - 0.5) * wide / 20, abs=1)


def test_layers_that_violate_the_condition_now_are_marked_red():
    names = [f"blocks.{i}.mlp" for i in range(60)]
    told = history("update_natural", [[0.1] * 60], (0.05, 0.2, 0.1), names, outside=["blocks.7.mlp", "blocks.59.mlp"])
    assert picture(told, "update_natural").named_red() == [7, 59]
    told.add(history("update_natural", [[0.1] * 60], (0.05, 0.2, 0.1), names).measurements[0])
    assert picture(told, "update_natural").named_red() == []


def test_names_of_neighbours_do_not_overlap():
    """However many are red, there is white between the lines of writing."""
    names = [f"n.{i}" for i in range(100)]
    told = history("update_natural", [[0.1] * 100], (0.05, 0.2, 0.1), names, outside=names)
    shown = picture(told, "update_natural")
    written = (shown.names[:, :-8] != 255).any((1, 2))  # left of the marks
    starts = np.nonzero(np.diff(written.astype(int)) == 1)[0]
    assert 20 <= len(starts) <= 40
    assert np.diff(starts).min() >= 12


@pytest.mark.parametrize(("layers", "high"), [(1, 300), (4, 300), (30, 800), (100, 800), (400, 800)])
def test_any_number_of_layers_and_steps_fits_on_a_screen(layers, high):
    told = history("update_natural", [[0.1 * 2**i for i in range(layers)]] * 30, (0.05, 0.2, 0.1))
    pixels = heatmap(told, "update_natural")
    assert pixels.shape[0] <= high
    assert pixels.shape[1] == 640
    assert pixels.shape[2] == 3


def test_long_names_leave_room_for_values():
    names = [f"model.decoder.layers.{i}.self_attention.query_key_value_projection" for i in range(4)]
    told = history("bfa_cos", [[0.1] * 4] * 3, names=names)
    assert picture(told, "bfa_cos").cells.shape[1] > 300


def test_there_is_nothing_to_draw():
    assert heatmap(History(), "update_natural") is None
    assert heatmap(history("update_natural", [[0.1]]), "bfa_cos") is None
    assert heatmap(history("update_natural", [[NAN, NAN]]), "update_natural") is None
    assert heatmap(history("update_natural", [[0.1]], role="vector"), "update_natural") is None


def test_rows_without_any_value_are_left_out():
    told = history("update_natural", [[0.1, NAN, 0.2]], (0.05, 0.2, 0.1), outside=["net.2"])
    shown = Picture(heatmap(told, "update_natural"), 2, 1)
    assert shown.place(1, 0) == pytest.approx(0.5 + 1 / 3, abs=LEVEL)  # of 2 ** 1.5
    assert shown.named_red() == [1]


def test_without_matplotlib_there_are_no_pictures(monkeypatch):
    told = history("update_natural", [[0.1]])
    assert can_draw()
    assert heatmap(told, "update_natural") is not None
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not can_draw()
    assert heatmap(told, "update_natural") is None


def test_settings_of_matplotlib_are_neither_used_nor_changed():
    told = history("update_natural", [[0.1, 0.2]], (0.05, 0.2, 0.1), names=["$x_1$", "b"])
    before = heatmap(told, "update_natural")
    changed = {"text.usetex": True, "axes.facecolor": "black", "image.cmap": "gray", "font.size": 30.0}
    with mpl.rc_context(changed):
        settings = dict(mpl.rcParams)
        assert (heatmap(told, "update_natural") == before).all()
        assert dict(mpl.rcParams) == settings


@pytest.mark.slow
def test_no_window_system_is_touched():
    code = (
        "import sys\n"
        "import spectral_monitor\n"
        "assert 'matplotlib' not in sys.modules\n"
        "from tests.reporting.test_heatmap import heatmap, history\n"
        "assert heatmap(history('bfa_cos', [[0.5]]), 'bfa_cos') is not None\n"
        "assert not {'matplotlib.pyplot', 'matplotlib.figure'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)


@pytest.mark.parametrize("name", ["two\nlines", "\r", "\x1b[31m", "\u2028"])
def test_a_name_with_line_ends_is_drawn_in_one_line(name):
    drawn = heatmap(history("update_natural", [[1.0, 2.0]], names=[name, "b"]), "update_natural")
    escaped = name.encode("unicode_escape").decode()
    expected = heatmap(history("update_natural", [[1.0, 2.0]], names=[escaped, "b"]), "update_natural")
    assert np.array_equal(drawn, expected)
