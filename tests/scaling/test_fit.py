"""Slopes and intervals against closed forms, numpy and scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from spectral_monitor.fitting.power_law import fit_slope, t_quantile

WIDTHS = (64, 100, 256, 700, 1024)


@pytest.mark.parametrize("freedom", [*range(1, 31), 99, 100, 1001])
def test_student(freedom):
    assert t_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-9)


def test_closed_forms_of_student():
    """One degree of freedom is Cauchy's; of two, t = a sqrt(2 / (1 - a^2)) with a = 0.95."""
    assert t_quantile(1) == pytest.approx(math.tan(math.pi * 0.475), rel=1e-12)
    assert t_quantile(2) == pytest.approx(0.95 * math.sqrt(2 / (1 - 0.95**2)), rel=1e-12)


@pytest.mark.parametrize("power", [-1.5, 0.0, 0.5])
def test_a_power_law(power):
    fit = fit_slope(WIDTHS, [[3 * w**power for w in WIDTHS], [0.1 * w**power for w in WIDTHS]])
    assert (fit.slope, fit.low, fit.high) == pytest.approx((power, power, power), abs=1e-12)
    assert (fit.seeds, fit.how, fit.reason) == ((0, 1), "seeds", "")


@pytest.mark.parametrize("seeds", [2, 3, 7])
def test_interval_over_seeds(seeds):
    values = np.exp(np.random.default_rng(seeds).normal(size=(seeds, len(WIDTHS))))
    slopes = np.polyfit(np.log(WIDTHS), np.log(values).T, 1)[0]
    low, high = stats.t.interval(0.95, seeds - 1, loc=slopes.mean(), scale=stats.sem(slopes))
    fit = fit_slope(WIDTHS, values.tolist())
    assert (fit.slope, fit.low, fit.high) == pytest.approx((slopes.mean(), low, high), rel=1e-9)


@pytest.mark.parametrize("count", [3, 4, 5])
def test_interval_of_one_seed(count):
    widths = WIDTHS[:count]
    values = np.exp(np.random.default_rng(count).normal(size=count))
    line = stats.linregress(np.log(widths), np.log(values))
    half = stats.t.ppf(0.975, count - 2) * line.stderr
    fit = fit_slope(widths, [values.tolist()])
    assert (fit.slope, fit.low, fit.high) == pytest.approx((line.slope, line.slope - half, line.slope + half), rel=1e-9)
    assert fit.how == "residuals"


def test_what_is_left_out():
    """A NaN is not a value of its seed, and a seed with two values is none."""
    full, hole, two = [1.0, 2.0, 4.0, 8.0], [1.0, math.nan, 16.0, 64.0], [1.0, math.nan, math.inf, 1.0]
    fit = fit_slope([1, 2, 4, 8], [full, two, hole])
    assert fit.seeds == (0, 2)
    assert fit.slope == pytest.approx((1 + 2) / 2)
    half = stats.t.ppf(0.975, 1) * stats.sem([1, 2])
    assert fit.high - fit.slope == pytest.approx(half)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([[1.0, 2.0, math.nan]], "values at only 2 sizes, a slope needs 3"),
        ([[1.0, math.nan, math.nan], [math.nan, 2.0, math.inf]], "values at only 1 sizes, a slope needs 3"),
        ([[math.nan] * 3], "no values"),
        ([[0.0, -1.0, math.inf]], "no values"),
    ],
)
def test_too_few(values, reason):
    fit = fit_slope([1, 2, 4], values)
    assert fit.reason == reason
    assert all(math.isnan(x) for x in (fit.slope, fit.low, fit.high))


def test_sizes_that_are_the_same_are_one():
    assert fit_slope([64, 64, 128], [[1.0, 2.0, 4.0]]).reason == "values at only 2 sizes, a slope needs 3"
