"""Where layers stand, in characters: monotone, within the scale, and out of the limits where the layer is."""

from __future__ import annotations

import math

import pytest

from spectral_monitor.reporting.text.gauge import POINT, WIDTH, gauge, scale

LIMITS = (1 / 16, 8.0)


def test_the_further_the_more_to_the_right():
    places = [gauge([2.0**power], LIMITS).index(POINT) for power in range(-9, 10)]
    assert places == sorted(places)
    assert (places[0], places[9], places[-1]) == (0, WIDTH // 2, WIDTH - 1)
    assert len(set(places)) == 15, "a power of two is a character or more, but beyond 128"


@pytest.mark.parametrize("ratio", [0.0, math.inf, 1e-30, 1e30])
def test_what_is_off_the_scale_is_at_its_end(ratio):
    assert gauge([ratio], LIMITS).index(POINT) == (0 if ratio < 1 else WIDTH - 1)


def test_brackets_stand_above_the_limits():
    line = gauge([math.nan, 1.0], LIMITS)
    assert [scale(LIMITS).index("["), scale(LIMITS).index("]")] == [k for k, mark in enumerate(line) if mark == "|"]
    assert gauge([math.nan], LIMITS) == ""
    assert "[" not in scale((0.0, 8.0))
    assert not {"[", "]"} & set(scale((math.nan, math.nan)))
