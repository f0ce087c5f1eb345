"""What a judged measurement looks like as text."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from spectral_monitor import LayerInfo, Measurement, Verdict
from spectral_monitor.measurement import LayerState
from spectral_monitor.reporting.text.table import measurement_rows

LAYERS = tuple(LayerInfo(name, "operator", 64, 64, (64, 64)) for name in ("a", "b", "c"))
VALUES = {"update_natural": torch.tensor([0.1, 0.5, 9.0]), "weight_natural": torch.tensor([1.0, 1.0, 1.0])}
NAN = torch.full((3,), math.nan)


def verdict(layer, quantity="update_natural", ratio=18.0, sentence="divide its learning rate"):
    return Verdict(layer, quantity, 9.0, (0.06, 4.0), ratio, 120, 7, "lr_too_large", sentence)


def measured(*verdicts, **summary):
    states = dict.fromkeys("abc", LayerState("healthy")) if "violations" in summary else {}
    return Measurement(500, LAYERS, VALUES, summary, verdicts, states=states)


def table(*verdicts, **summary):
    return measured(*verdicts, **summary).table().splitlines()


def column(measurement, title):
    return next(list(column.cells) for column in measurement_rows(measurement).columns if column.title == title)


def test_nothing_is_said_where_nobody_has_judged():
    assert table()[0] == "spectral monitor, step 500: not judged: this measurement was not judged"
    assert measurement_rows(measured()).state == "not judged"


def test_all_is_well():
    lines = table(violations=0.0)
    assert lines[0] == "spectral monitor, step 500: all 3 layers healthy"
    assert "what" not in lines[1]
    assert measurement_rows(measured(violations=0.0)).state == "healthy"


@pytest.mark.parametrize(("error", "said"), [(0.29, False), (0.66, True), (math.nan, False)])
def test_changes_of_features_that_are_uncertain_say_so(error, said):
    last = table(feature_error=error, loss_change_predicted=-0.1)[-1]
    assert ("dh/h from few samples, error up to 66 %" in last) == said


def test_offenders_come_first_with_an_arrow_and_a_sentence():
    lines = table(verdict("c"), verdict("a", ratio=0.01, sentence="too small"), violations=2.0)
    assert lines[0] == "spectral monitor, step 500: 2 of 3 layers off: c, a; 1 healthy"
    found = measurement_rows(measured(verdict("c"), verdict("a"), violations=2.0))
    assert (found.state, found.states) == ("off", ("off", "off", "healthy"))
    assert lines[1:3] == ["! c: divide its learning rate", "! a: too small"]
    assert [line.split()[0] for line in lines[3:7]] == ["layer", "c", "a", "b"]
    assert "18.0 ^" in lines[4]
    assert "0.20 v" in lines[5]
    assert "^" not in lines[6]
    assert [line[lines[3].index("what") :] for line in lines[4:7]] == ["lr too large", "lr too large", ""]
    assert column(measured(verdict("c"), violations=1.0), "should be") == ["0.06 .. 4", "", ""]


@pytest.mark.parametrize(
    ("quantity", "name"),
    [("feature_rms", "size of the outputs"), ("lr", "learning rate"), ("weight_fro", "weight_fro")],
)
def test_a_quantity_that_is_not_shown_is_named(quantity, name):
    """By its title, or by its key if it has none."""
    lines = table(verdict("b", quantity=quantity), violations=1.0)
    words = " ".join(line[lines[2].index("what") :].strip() for line in lines[3:7]).split()
    assert " ".join(words).startswith(f"{name} 9.00: lr too large")
    assert "^" not in "".join(lines)


@pytest.mark.parametrize(
    ("band", "words"), [((0.0, 0.5), "below 0.5"), ((0.0, math.inf), "above 0"), ((0.1, 20.0), "0.1 .. 20")]
)
def test_where_a_value_should_be(band, words):
    offender = replace(verdict("b"), band=band)
    assert column(measured(offender, violations=1.0), "should be") == [words, "", ""]
    assert f", should be {words}, for 120 steps" in str(offender)


def test_updates_are_held_against_their_references():
    bands = {"update_natural": torch.tensor([[0.0, 1.0, 0.2], [math.nan] * 3, [0.0, 1.0, 3.0]])}
    assert column(replace(measured(), bands=bands), "vs. typical") == ["0.50", "-", "3.00"]


@pytest.mark.parametrize(
    "bands", [{}, {"update_natural": torch.full((3, 3), math.nan)}, {"weight_natural": torch.full((3, 3), math.nan)}]
)
def test_without_references_against_the_median(bands):
    assert column(replace(measured(), bands=bands), "vs. typical") == ["0.20", "1.00", "18.0"]


def test_what_is_nan_is_not_inside():
    values, reason = {"update_natural": NAN, "weight_natural": NAN}, "NaN or inf in its values"
    states = dict.fromkeys("abc", LayerState("not judged", reason))
    lost = replace(measured(violations=0.0), values=values, reasons={"*/*": reason}, states=states)
    words = "spectral monitor, step 500: not judged: NaN or inf in its values"
    assert lost.table().splitlines()[0] == words
    assert measurement_rows(lost).state == "not judged"
    assert measurement_rows(replace(lost, verdicts=(verdict("a", quantity="contribution"),))).state == "off"


def test_biases_are_shown_only_if_they_are_outside():
    bias = LayerInfo("bias", "vector", 64, 1, (64,))
    measurement = replace(measured(violations=0.0), layers=(*LAYERS[:2], bias))
    assert column(measurement, "layer") == ["a", "b"]
    assert column(replace(measurement, verdicts=(verdict("bias"),)), "layer") == ["bias", "a", "b"]


def test_a_name_can_neither_break_a_line_nor_steer_a_terminal():
    odd = (LayerInfo("a\n\x1b[2J\u202e", "operator", 64, 64, (64, 64)), *LAYERS[1:])
    text = replace(measured(), layers=odd).table()
    assert "a\\n\\x1b[2J\\u202e" in text
    assert all(character.isprintable() for character in text.replace("\n", ""))
    assert len(text.splitlines()) == len(table())
