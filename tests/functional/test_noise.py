"""Formulas of the noise of gradients, against gradients that are written out, and with samples left out one by one."""

from __future__ import annotations

import math

import pytest
import torch

from spectral_monitor.functional import noise
from spectral_monitor.functional.noise import MIN_SAMPLES, noise_moments, noise_scale, sample_products
from spectral_monitor.functional.standard_errors import STUDENT
from tests.functional.made import Made


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def moments_of(c):
    return noise_moments(c.square().sum(1), c @ c.sum(0))


# --- products


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 6, 5), (30, 4, 3), (3, 8, 9)])
def test_products_by_gradients_written_out(rows, inputs, outputs):
    x, b = drawn(7, rows, inputs, seed=1), drawn(7, rows, outputs, seed=2)
    c = torch.stack([sum(torch.outer(bt, ht) for bt, ht in zip(b[i], x[i], strict=True)) for i in range(7)]).flatten(1)
    squares, along = sample_products(x, 1e-30 * b)
    torch.testing.assert_close(squares, 1e-60 * c.square().sum(1), rtol=1e-12, atol=0)
    torch.testing.assert_close(along, 1e-60 * c @ c.sum(0), rtol=1e-12, atol=0)


def test_products_are_of_full_precision_under_autocast_too():
    x, b = drawn(7, 3, 6, seed=1).float(), drawn(7, 3, 5, seed=2).float()
    expected = sample_products(x.double(), b.double())
    with torch.autocast("cpu", torch.bfloat16):
        found = sample_products(x, b)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_nothing_has_products_of_zero():
    for x, b in ((drawn(5, 2, 3), torch.zeros(5, 2, 4)), (torch.zeros(5, 2, 3), drawn(5, 2, 4))):
        for found in sample_products(x, b):
            assert found.dtype == torch.float64
            assert torch.equal(found, torch.zeros(5).double())


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 30, 20), (3, 40, 50), (20, 4, 5), (40, 30, 2)])
@pytest.mark.parametrize("chunk", [1, 500, 5000, 1 << 22])
def test_products_are_made_of_a_few_samples_at_a_time(monkeypatch, rows, inputs, outputs, chunk):
    """By rows, or of gradients that are written out, whichever is less work."""
    x, b = drawn(9, rows, inputs), drawn(9, rows, outputs, seed=1)
    expected = sample_products(x, b)
    monkeypatch.setattr(noise, "CHUNK", chunk)
    by_rows = rows * (inputs + outputs) <= inputs * outputs
    entries = max(rows**2 if by_rows else inputs * outputs, rows * inputs)  # of each sample
    parts = math.ceil(9 / max(1, chunk // entries))
    with Made() as made:
        found = sample_products(x, b)
    # A product of all samples together, and in each part those with it, and one or two of its own.
    assert made.calls["mm"] + made.calls.get("bmm", 0) == 1 + parts * (3 if by_rows else 2)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)


# --- moments


@pytest.mark.parametrize("samples", [4, 5, 11])
def test_moments_by_leaving_out_each_sample(samples):
    c = drawn(samples, 3, seed=samples) + 0.5
    A, P = parts(c)
    left = torch.tensor([parts(torch.cat([c[:i], c[i + 1 :]])) for i in range(samples)], dtype=torch.float64)
    off = left - left.mean(0)
    variances = (samples - 1) / samples * off.T @ off
    expected = [samples, A, P / A, variances[0, 0] / A**2, variances[0, 1] / A**2, variances[1, 1] / A**2]
    torch.testing.assert_close(moments_of(c), torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=0)


@pytest.mark.parametrize("samples", [0, 1, 2, 3])
def test_moments_of_few_samples_are_zeros(samples):
    assert MIN_SAMPLES == 4
    assert torch.equal(moments_of(drawn(samples, 2)), torch.zeros(6).double())


def test_gradients_of_zero_have_moments_but_no_scale():
    moments = moments_of(torch.zeros(6, 2).double())
    assert moments.tolist() == [6, 0, 0, 0, 0, 0]
    assert all(math.isnan(x) for x in noise_scale(moments[None]))


# --- the scale and its interval


def parts(rows):
    """Return the mean square of gradients and the mean product of two, pair by pair."""
    gram, S = rows @ rows.T, len(rows)
    return float(gram.diagonal().mean()), sum(float(gram[i, j]) for i in range(S) for j in range(S) if i != j) / (
        S * (S - 1)
    )


def fieller(processes):
    """Return A / P, and a function of a ratio r: (A - r P)^2 - z^2 Var(A - r P), below 0 inside the interval.

    Pairs are those of one process, and samples are left out of their own process: variances add up.
    """
    samples = sum(map(len, processes))
    pairs = sum(len(c) * (len(c) - 1) for c in processes)
    A = sum(len(c) / samples * parts(c)[0] for c in processes)
    P = sum(len(c) * (len(c) - 1) / pairs * parts(c)[1] for c in processes)
    freedom = samples - len(processes)
    z = 2 * (*STUDENT, 1.0)[min(freedom - 1, len(STUDENT))]  # against scipy in test_errors.py
    left = [[parts(torch.cat([c[:i], c[i + 1 :]])) for i in range(len(c))] for c in processes]

    def off(ratio):
        variance = 0.0
        for c, some in zip(processes, left, strict=True):
            of_A, of_P = len(c) / samples, len(c) * (len(c) - 1) / pairs
            values = [of_A * a - ratio * of_P * p for a, p in some]
            mean = sum(values) / len(c)
            variance += (len(c) - 1) / len(c) * sum((value - mean) ** 2 for value in values)
        return (A - ratio * P) ** 2 - z**2 * variance

    return A / P, off


def crossing(off, inside, outside):
    assert off(inside) < 0 < off(outside)
    for _ in range(80):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if off(middle) < 0 else (inside, middle)
    return inside - 1


@pytest.mark.parametrize("counts", [(40,), (5,), (14,), (15,), (16,), (12, 30), (8, 5, 21), (4, 60)], ids=str)
def test_the_interval_by_leaving_out_each_sample(counts):
    """Fieller's interval: its ends are where the difference is some standard errors, found by bisection."""
    processes = [0.4 * (k + 1) * (drawn(count, 6, seed=3 + k) * 0.5 + 1.0) for k, count in enumerate(counts)]
    ratio, off = fieller(processes)
    found = noise_scale(torch.stack([moments_of(c) for c in processes]))
    assert found.value == pytest.approx(ratio - 1, rel=1e-9)
    low, high = max(crossing(off, ratio, 0.0), 0.0), crossing(off, ratio, 20 * ratio)
    assert found.low == pytest.approx(low, rel=1e-6)
    assert found.high == pytest.approx(high, rel=1e-6)


def test_processes_without_samples_count_for_nothing():
    c = drawn(20, 3) + 1
    one = moments_of(c)
    alone = noise_scale(one[None])
    assert noise_scale(torch.stack([torch.zeros(6).double(), one, torch.zeros(6).double()])) == alone
    for empty in (torch.zeros(0, 6), torch.zeros(2, 6), torch.full((1, 6), math.nan), torch.full((1, 6), math.inf)):
        assert all(math.isnan(x) for x in noise_scale(empty.double()))


def test_gradients_that_all_agree_have_no_noise():
    found = noise_scale(moments_of(torch.ones(9, 4).double())[None])
    assert found.value == pytest.approx(0, abs=1e-12)
    assert found.low == pytest.approx(0, abs=1e-12)
    assert found.high == pytest.approx(0, abs=1e-12)


def test_gradients_of_which_nothing_is_known_may_be_anything():
    """Samples that cancel: then no scale is ruled out, and the interval begins at zero."""
    c = torch.cat([drawn(3, 2, seed=1), -drawn(3, 2, seed=1)])
    found = noise_scale(moments_of(c)[None])
    assert math.isnan(found.value)
    assert (found.low, found.high) == (0.0, math.inf)


def test_gradients_that_may_be_zero_have_no_upper_end():
    """A mean within its error of zero: the scale has a value, but may be anything above the lower end."""
    c = drawn(30, 2, seed=5)
    c = c - c.mean(0) + torch.tensor([0.25, 0.0])
    found = noise_scale(moments_of(c)[None])
    ratio, off = fieller([c])
    assert found.value == pytest.approx(ratio - 1)
    assert found.value > 0
    assert found.high == math.inf
    assert off(1e9) < 0
    assert found.low == pytest.approx(crossing(off, ratio, 0.0), rel=1e-6)


def test_estimates_below_zero_leave_a_lower_end_or_say_nothing():
    c = drawn(30, 2, seed=5)
    c = c - c.mean(0) + torch.tensor([0.1, 0.0])
    found = noise_scale(moments_of(c)[None])
    _, off = fieller([c])
    assert math.isnan(found.value)
    assert found.high == math.inf
    assert found.low == pytest.approx(crossing(off, 1e9, 0.0), rel=1e-6)
    assert found.low > 1
    # Of pairs of opposites the estimate is surely below zero, which no mean gradient can be.
    opposite = torch.cat([c[:, :1].abs(), -c[:, :1].abs()])
    found = noise_scale(moments_of(opposite)[None])
    assert math.isnan(found.value)
    assert found[1:] == (0.0, math.inf)


def test_the_lower_end_is_never_below_zero():
    """Where the mean square may be below the mean product."""
    c = torch.ones(30, 2).double() + 0.01 * drawn(30, 2, seed=8)
    moments = moments_of(c)
    moments[3] *= 1e4  # the mean square is hardly known
    assert noise_scale(moments[None]).low == 0.0
