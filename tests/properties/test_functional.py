"""Formulas of weights on drawn matrices, against singular values, explicit loops and what holds between them."""

from __future__ import annotations

import math
import statistics

import torch
from hypothesis import given
from hypothesis import strategies as st

import spectral_monitor.functional as F
from spectral_monitor.fitting.medians import geometric_median
from spectral_monitor.functional.attention import (
    attention_numbers,
    bilinear_change_norm,
    bilinear_norm,
    product_bound,
)
from spectral_monitor.functional.norms import balance_ratios
from spectral_monitor.functional.standard_errors import STUDENT, standard_error
from spectral_monitor.linalg.spectral_norms import SMALL
from tests.properties.drawn import Drawn, but_for_bad_starts, orthogonal, seeds, spectra, stacks


def close(found: torch.Tensor, expected: torch.Tensor, x: Drawn, relative: float) -> bool:
    """Close, NaN where NaN is expected, and within the last digits of what is too small for a relative error."""
    assert found.shape == expected.shape
    off = (found.double() - expected).abs()
    fine = (off <= relative * expected.abs() + 4 * x.last_digit) | (found.isnan() & expected.isnan())
    return bool(fine.all())


def accuracy(x: Drawn) -> float:
    """Of an estimate: its tolerance for matrices whose sides are both long; rounding for all others."""
    return 0.01 if min(x.A.shape[1:]) > SMALL else 8 * x.eps * math.sqrt(max(x.A.shape[1:]))


def nan_of_nothing(x: Drawn, value: float) -> torch.Tensor:
    return torch.where(x.values[:, 0] == 0, math.nan, torch.full_like(x.values[:, 0], value))


def divided(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.where(b == 0, math.nan, a / b)


# --- one matrix


@given(stacks(subnormal=True))
def test_norms_are_those_of_the_singular_values(x):
    assert but_for_bad_starts(lambda y: close(F.spectral_norm(y.A), y.truth, y, accuracy(y)), x)
    assert close(F.spectral_norm(x.A, exact=True), x.truth, x, 64 * x.eps)
    assert close(F.frobenius_norm(x.A), x.fro, x, 64 * x.eps)
    low, high = F.spectral_norm_bounds(x.A)
    assert bool(((low.double() <= x.truth) & (x.truth <= high.double())).all())


@given(stacks())
def test_leading_dimensions_are_kept(x):
    A = torch.stack([x.A, x.A])
    for measure in (F.spectral_norm, F.frobenius_norm, F.stable_rank, F.natural_norm):
        whole, part = measure(A), measure(x.A)
        assert whole.shape == (2, len(x.A))
        assert measure(x.A[0]).shape == ()
        torch.testing.assert_close(whole[1], part, rtol=0.01, atol=0, equal_nan=True)


@given(stacks())
def test_stable_ranks_lie_between_one_and_the_rank(x):
    def holds(y: Drawn) -> bool:
        expected = divided((y.values**2).sum(1), y.values[:, 0] ** 2)
        return close(F.stable_rank(y.A), expected, y, 3 * accuracy(y))

    assert but_for_bad_starts(holds, x)
    estimated, found = F.stable_rank(x.A), F.stable_rank(x.A, exact=True)
    some = ~found.isnan()
    assert bool((torch.minimum(estimated, found)[some] >= 1 - 100 * x.eps).all())
    assert bool((found[some] <= (x.values > 0).sum(1).double()[some] * (1 + 100 * x.eps)).all())


@given(stacks(), seeds)
def test_no_output_is_larger_than_the_natural_norm_times_its_input(x, seed):
    _, m, n = x.A.shape
    inputs = torch.randn(n, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    outputs = (x.A.double() / x.unit) @ inputs
    stretch = outputs.square().mean(1).sqrt() / inputs.square().mean(0).sqrt() * x.unit
    found = F.natural_norm(x.A, exact=True).double()[:, None]
    assert bool((stretch <= found * (1 + 100 * x.eps)).all())

    def holds(y: Drawn) -> bool:
        return close(F.natural_norm(y.A, "readout"), math.sqrt(n / m) * y.truth, y, accuracy(y))

    assert but_for_bad_starts(holds, x)
    flipped, here = F.natural_norm(x.A.mT, exact=True), F.natural_norm(x.A, exact=True)
    assert close(flipped * n, here.double() * m, x, 100 * x.eps)


@given(stacks())
def test_rows_of_tables_and_vectors_are_measured_by_their_root_mean_square(x):
    rows = (x.A.double() / x.unit).square().mean(2).sqrt() * x.unit
    assert close(F.natural_norm(x.A, "vector"), rows, x, 16 * x.eps)
    assert close(F.natural_norm(x.A, "embedding"), rows.amax(1), x, 16 * x.eps)


# --- two matrices


@given(stacks(), st.integers(-100, 100), seeds)
def test_an_update_is_measured_relative_to_its_weight(x, power, seed):
    _, m, n = x.A.shape

    def pair(y: Drawn) -> tuple[torch.Tensor, torch.Tensor]:
        A = y.A.double() / y.unit
        return A * 2.0**power, orthogonal(m, seed) @ A @ orthogonal(n, seed + 1)

    alike = nan_of_nothing(x, 2.0**power)
    assert but_for_bad_starts(lambda y: close(F.update_ratio(*pair(y)), alike, y, 0.021), x)
    dW, W = pair(x)
    assert close(F.update_ratio(dW, W, exact=True), alike, x, 1e-12)
    assert bool(F.update_ratio(W, torch.zeros_like(W)).isnan().all())


@given(stacks(), st.floats(-3, 3))
def test_a_weight_that_grows_drifts_by_its_growth(x, growth):
    W0 = x.A.double() / x.unit
    W = (1 + growth) * W0
    expected = nan_of_nothing(x, abs(growth))
    for found in (F.drift_ratio(W, W0, exact=True), F.drift_fro_ratio(W, W0)):
        assert bool(((found - expected).abs() <= 1e-13).logical_or(found.isnan() & expected.isnan()).all())


@given(stacks(), seeds)
def test_drift_is_that_of_the_exact_difference(x, seed):
    """Of half precisions too: their difference is not rounded to them."""
    _, m, n = x.A.shape
    W0 = (orthogonal(m, seed) @ (x.A.double() / x.unit) @ orthogonal(n, seed + 1) * x.unit).to(x.A.dtype)
    exact, start = ((y.double()) / x.unit for y in (x.A.double() - W0.double(), W0))
    sizes = torch.linalg.svdvals(exact), torch.linalg.svdvals(start)
    for found, (moved, from_) in (
        (F.drift_ratio(x.A, W0, exact=True), (sizes[0][:, 0], sizes[1][:, 0])),
        (F.drift_fro_ratio(x.A, W0), (sizes[0].norm(dim=1), sizes[1].norm(dim=1))),
    ):
        expected = divided(moved, from_)
        assert bool(((found - expected).abs() <= 64 * x.eps * (1 + expected)).logical_or(expected.isnan()).all())
        assert torch.equal(found.isnan(), expected.isnan())


@given(stacks(), st.floats(-2, 2))
def test_weights_cancel_as_much_as_they_are_opposed(x, share):
    W = x.A.double()
    found = F.weight_cancellation(W, share * W, exact=True)
    expected = nan_of_nothing(x, abs(1 + share) / (1 + abs(share)))
    assert bool(((found - expected).abs() <= 1e-13).logical_or(found.isnan() & expected.isnan()).all())


@given(stacks(), seeds)
def test_cancellation_is_at_most_one(x, seed):
    _, m, n = x.A.shape
    dW = (orthogonal(m, seed) @ x.A.double() @ orthogonal(n, seed + 1)).to(x.A.dtype)
    found = F.weight_cancellation(x.A, dW)
    assert bool(((found >= 0) & (found <= 1))[~found.isnan()].all())
    assert torch.equal(found.isnan(), (x.values[:, 0] == 0) & (dW == 0).all(-1).all(-1))


# --- attention


@st.composite
def heads(draw: st.DrawFn) -> torch.Tensor:
    """Four factors (heads, d, n): queries and keys, before and after."""
    count, d = draw(st.integers(1, 3)), draw(st.integers(1, 8))
    columns = [draw(st.integers(1, 20)) for _ in range(2)]
    factors = []
    for n in (*columns, *columns):
        r = min(d, n)
        some = [
            orthogonal(d, seed := draw(seeds))[:, :r] @ torch.diag(draw(spectra(r))) @ orthogonal(n, seed + 1)[:r]
            for _ in range(count)
        ]
        factors.append(torch.stack(some))
    return factors


@given(heads(), st.integers(-60, 60))
def test_norms_of_bilinear_forms_are_those_of_the_products_written_out(factors, power):
    query, key, new_query, new_key = factors
    query, new_query = query * 2.0**power, new_query * 2.0**power
    before, after = query.mT @ key, new_query.mT @ new_key
    scale = torch.linalg.matrix_norm(query, 2) * torch.linalg.matrix_norm(key, 2)
    written = torch.linalg.matrix_norm(before, 2)
    found = bilinear_norm(query, key)
    assert bool(((found - written).abs() <= 3e-6 * scale).all())
    assert bool(((product_bound(query, key) - scale).abs() <= 1e-6 * scale).all())
    assert bool((found <= scale * (1 + 1e-6)).all())
    moved = bilinear_change_norm(query, key, new_query, new_key)
    sizes = (torch.linalg.matrix_norm(new_query - query, 2) + torch.linalg.matrix_norm(query, 2)) * (
        torch.linalg.matrix_norm(new_key - key, 2) + torch.linalg.matrix_norm(new_key, 2)
    )
    assert bool(((moved - torch.linalg.matrix_norm(after - before, 2)).abs() <= 3e-6 * sizes).all())


@given(st.tuples(*[st.integers(1, 4)] * 4), seeds, st.floats(0, 50))
def test_numbers_of_attention_are_those_of_loops_over_rows(sizes, seed, spread):
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(*sizes, generator=generator, dtype=torch.float64)
    allowed = torch.rand(sizes[0], 1, *sizes[2:], generator=generator) < 0.7
    weights = logits.masked_fill(~allowed, -math.inf).softmax(-1).nan_to_num(0)
    found = attention_numbers(logits, allowed, weights)
    largest, sinks, entropies = -math.inf, [], [[] for _ in range(sizes[1])]
    for s in range(sizes[0]):
        for h in range(sizes[1]):
            for r in range(sizes[2]):
                keys = [k for k in range(sizes[3]) if allowed[s, 0, r, k]]
                largest = max([largest, *(float(logits[s, h, r, k]) for k in keys)])
                p = [float(weights[s, h, r, k]) for k in keys]
                if keys:
                    sinks.append(float(weights[s, h, r, 0]))
                if len(keys) > 1:
                    entropies[h].append(-sum(w * math.log(w) for w in p if w > 0) / math.log(len(keys)))
    assert float(found.logit_max) == largest
    every = [value for head in entropies for value in head]
    for value, expected in (
        (found.entropy, statistics.mean(every) if every else math.nan),
        (found.sink, statistics.mean(sinks) if sinks else math.nan),
    ):
        assert abs(float(value) - expected) <= 1e-7 or (math.isnan(value) and math.isnan(expected))
    if every:
        assert abs(float(found.lowest) - min(statistics.mean(head) for head in entropies if head)) <= 1e-7


# --- numbers of several layers or groups

sizes = st.floats(1e-30, 1e30)


@given(st.lists(st.one_of(sizes, st.sampled_from([0.0, -1.0, math.nan, math.inf])), max_size=9), st.integers(-60, 60))
def test_geometric_medians_grow_with_the_values(values, power):
    median, grown = geometric_median(values), geometric_median([2.0**power * value for value in values])
    some = sorted(value for value in values if 0 < value < math.inf)
    if not some:
        assert math.isnan(median)
        return
    middle = math.sqrt(some[(len(some) - 1) // 2]) * math.sqrt(some[len(some) // 2])
    assert math.isclose(median, middle, rel_tol=1e-12)
    assert math.isclose(grown, median * 2.0**power, rel_tol=1e-12)
    ratios = balance_ratios(torch.tensor(values, dtype=torch.float64))
    for value, ratio in zip(values, ratios.tolist(), strict=True):
        assert math.isclose(ratio, value / middle, rel_tol=1e-12) if value > 0 else math.isnan(ratio)


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-9, 9)), min_size=1, max_size=20))
def test_standard_errors_are_those_of_leaving_groups_out(groups):
    sums = torch.tensor([[float(rows), rows * value] for rows, value in groups], dtype=torch.float64)
    found = standard_error(sums, lambda total: total[..., 1:] / total[..., :1])
    some = [(rows, rows * value) for rows, value in groups if rows]
    if len(some) < 2:
        assert bool(found.isnan().all())
        return
    rows, total = (sum(column) for column in zip(*some, strict=True))
    left = [(total - value) / (rows - count) for count, value in some]
    n = len(some)
    jackknife = math.sqrt((n - 1) / n * sum((value - statistics.fmean(left)) ** 2 for value in left))
    widened = STUDENT[n - 2] if n - 2 < len(STUDENT) else 1.0
    assert abs(float(found) - widened * jackknife) <= 1e-7 * (1 + jackknife)
