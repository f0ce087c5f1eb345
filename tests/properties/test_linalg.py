"""Estimates of spectral norms on drawn matrices: against all singular values, and what holds between matrices."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spectral_monitor.linalg import (
    Shard,
    ShardedStack,
    SpectralEstimate,
    compute_dtype,
    frobenius,
    gather,
    run,
    run_local,
    sequence,
    spectral_estimate,
    spectral_estimates,
    tame,
)
from spectral_monitor.linalg.spectral_norms import SMALL
from tests.linalg.simulated import Room
from tests.properties.drawn import Drawn, broad, but_for_bad_starts, orthogonal, placed, seeds, shapes, spectra, stacks

COLUMNS = ("sigma", "sigma_low", "error_bound", "sigma_high", "fro")
tolerances = st.sampled_from([0.5, 0.1, 0.01, 1e-3])


def rounding(x: Drawn) -> float:
    """What products of these matrices are off by, relatively."""
    return 8 * x.eps * math.sqrt(max(x.A.shape[1:]))


def near(found: torch.Tensor, expected: torch.Tensor, relative: float, x: Drawn) -> bool:
    """Close but for a relative error, and for the last digit of numbers too small for one."""
    off = (found.double() - expected).abs()
    return bool((off <= relative * expected.abs() + 2 * x.last_digit).all())


def as_alone(e: SpectralEstimate, x: Drawn) -> bool:
    """Right within its tolerance, or as wrong as the matrices are after an unlucky start in a solve of their own."""
    A = x.A.to(compute_dtype(x.A.dtype))
    accuracy = 0.01 if min(A.shape[1:]) > SMALL else 1e-4
    return near(e.sigma, x.truth, accuracy, x) or near(e.sigma, spectral_estimate(A).sigma.double(), 1e-4, x)


# --- one stack against its singular values


@pytest.mark.slow
@given(stacks(subnormal=True), tolerances)
def test_the_estimate_and_its_bounds_hold_the_truth(x, tol):
    e = spectral_estimate(x.A, tol=tol)
    truth = x.truth
    assert e.sigma.dtype == compute_dtype(x.A.dtype)

    def holds(y: Drawn) -> bool:
        accuracy = tol if min(y.A.shape[1:]) > SMALL else rounding(y)
        return near(spectral_estimate(y.A, tol=tol).sigma, y.truth, accuracy, y)

    assert but_for_bad_starts(holds, x)
    assert bool((e.sigma.double() <= truth * (1 + rounding(x)) + 2 * x.last_digit).all())
    assert bool((e.sigma_low.double() <= truth).all())
    assert bool((truth <= e.sigma_high.double()).all())
    assert bool((e.sigma_high.double() <= x.fro * (1 + 3 * rounding(x)) + 2 * x.last_digit).all())


@given(st.one_of(stacks(subnormal=True), broad()), tolerances)
def test_some_singular_value_is_within_the_error_bound(x, tol):
    e = spectral_estimate(x.A, tol=tol)
    off = (x.values * x.unit - e.sigma.double()[:, None]).abs().amin(1)
    assert bool((off <= e.error_bound.double()).all())


@given(stacks(subnormal=True))
def test_exact_norms_are_those_of_a_float64_svd(x):
    assert near(spectral_estimate(x.A, exact=True).sigma, x.truth, 64 * x.eps, x)


@given(stacks(subnormal=True))
def test_frobenius_norms_are_the_root_of_the_sum_of_squares(x):
    """Those of the singular values, whatever the size of the entries."""
    assert near(spectral_estimate(x.A).fro, x.fro, rounding(x), x)
    _, fro, scale, _ = run_local(tame([ShardedStack.whole(x.A.to(compute_dtype(x.A.dtype)))]))
    assert near(fro * scale, x.fro, rounding(x), x)


@given(stacks(subnormal=True))
def test_a_zero_norm_is_that_of_a_zero_matrix(x):
    zero = (x.A == 0).all(-1).all(-1)
    e = spectral_estimate(x.A)
    for name in COLUMNS:
        value = getattr(e, name)
        assert bool((value[zero] == 0).all()), name
    assert bool((e.sigma_high[~zero] > 0).all())
    assert bool((e.fro[~zero] > 0).all())


# --- between matrices


@given(stacks(), st.integers(-115, 115), st.sampled_from([1.0, -1.0]))
def test_norms_grow_with_the_matrix(x, power, sign):
    """Over 70 decades; by a power of two, by which no entry is rounded."""
    A, c = x.A.double() / x.unit, sign * 2.0**power
    one, other = spectral_estimate(A), spectral_estimate(c * A)
    for name in ("sigma", "sigma_low", "sigma_high", "fro"):
        torch.testing.assert_close(getattr(other, name), abs(c) * getattr(one, name), rtol=1e-9, atol=0)


@given(stacks())
def test_a_transposed_matrix_has_the_same_norms(x):
    def both(y: Drawn) -> tuple[SpectralEstimate, SpectralEstimate]:
        A = y.A.double()
        return spectral_estimate(A, tol=1e-3), spectral_estimate(A.mT, tol=1e-3)

    assert but_for_bad_starts(lambda y: near(*(e.sigma for e in both(y)), 1e-3, y), x)
    assert near(*(e.fro for e in both(x)), 1e-12, x)


@given(stacks(), seeds)
def test_orthogonal_maps_change_nothing(x, seed):
    _, m, n = x.A.shape

    def both(y: Drawn) -> tuple[SpectralEstimate, SpectralEstimate]:
        A = y.A.double()
        turned = orthogonal(m, seed) @ A @ orthogonal(n, seed + 1)
        return spectral_estimate(A, tol=1e-3), spectral_estimate(turned, tol=1e-3)

    assert but_for_bad_starts(lambda y: near(*(e.sigma for e in both(y)), 1e-3, y), x)
    assert near(*(e.fro for e in both(x)), 1e-12, x)


@given(stacks(subnormal=True), st.randoms(use_true_random=False))
def test_the_order_of_rows_and_columns_does_not_matter(x, random):
    _, m, n = x.A.shape
    rows, columns = random.sample(range(m), m), random.sample(range(n), n)

    def both(y: Drawn) -> tuple[SpectralEstimate, SpectralEstimate]:
        return spectral_estimate(y.A), spectral_estimate(y.A[:, rows][:, :, columns])

    assert but_for_bad_starts(lambda y: near(*(e.sigma.double() for e in both(y)), 0.01, y), x)
    assert near(*(e.fro.double() for e in both(x)), rounding(x), x)


@given(stacks(), seeds)
def test_the_norm_of_a_sum_is_at_most_the_sum_of_norms(x, seed):
    (_, m, n), A = x.A.shape, x.A.double()
    B = orthogonal(m, seed) @ A @ orthogonal(n, seed + 1)
    a, b, both = (spectral_estimate(some, exact=True).sigma for some in (A, B, A + B))
    assert bool((both <= (a + b) * (1 + 1e-12)).all())
    assert bool((both >= (a - b).abs() * (1 - 1e-12) - 1e-12 * a).all())


@given(stacks(), seeds)
def test_the_norm_of_a_product_is_at_most_the_product_of_norms(x, seed):
    K, m, n = x.A.shape
    A = x.A.double() / x.unit
    B = torch.randn(K, n, m, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    a, b, both = (spectral_estimate(some, tol=1e-3) for some in (A, B, A @ B))
    assert bool((both.sigma_low <= a.sigma_high * b.sigma_high).all())


@given(stacks(subnormal=True))
def test_norms_are_ordered(x):
    """|A|_2 <= |A|_F <= sqrt(rank) |A|_2, and no row or column is longer than |A|_2."""
    e = spectral_estimate(x.A, exact=True)
    sigma, fro = e.sigma.double(), e.fro.double()
    slack, last = 1 + rounding(x), 4 * x.last_digit
    assert bool((sigma <= fro * slack + last).all())
    ranks = (x.values > 0).sum(1).double()
    assert bool((fro <= ranks.sqrt() * sigma * slack + ranks * last).all())
    entries = x.A.double() / x.unit
    for dim in (1, 2):
        assert bool((entries.norm(dim=dim).amax(1) * x.unit <= sigma * slack + last).all())


@given(stacks(subnormal=True), stacks(subnormal=True))
def test_the_norm_of_blocks_is_the_largest_of_theirs(x, y):
    blocks = [torch.block_diag(a.double() / x.unit, b.double() / y.unit) for a, b in zip(x.A, y.A, strict=False)]
    A = torch.stack(blocks)
    found = spectral_estimate(A, tol=1e-3)
    truth = torch.maximum(x.values[: len(A), 0], y.values[: len(A), 0])
    assert bool(((found.sigma - truth).abs() <= 1e-3 * truth).all())
    assert bool((found.sigma_low <= truth * (1 + 1e-13)).all())
    assert bool((truth <= found.sigma_high * (1 + 1e-13)).all())


@given(stacks(subnormal=True), st.integers(1, 30), seeds)
def test_appended_rows_never_lower_it(x, count, seed):
    K, _, n = x.A.shape
    more = torch.randn(K, count, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * x.unit / n
    one, other = (spectral_estimate(A) for A in (x.A, torch.cat([x.A, more.to(x.A.dtype)], dim=1)))
    assert bool((other.sigma_high >= one.sigma_low).all())
    assert bool((other.fro.double() >= one.fro.double() * (1 - rounding(x))).all())


# --- what is in a stack, and in which stacks


@given(stacks(subnormal=True), st.sampled_from([math.nan, math.inf, -math.inf]), st.data())
def test_bad_entries_spoil_their_own_matrix_only(x, bad, data):
    K, m, n = x.A.shape
    k, i, j = (data.draw(st.integers(0, size - 1)) for size in (K, m, n))
    B = x.A.clone()
    B[k, i, j] = bad
    clean, dirty = spectral_estimate(x.A), spectral_estimate(B)
    others = torch.arange(K) != k
    for name in COLUMNS:
        value = getattr(dirty, name)
        assert not value[k].isfinite()
        torch.testing.assert_close(
            value[others], getattr(clean, name)[others], rtol=1e-2, atol=math.inf if name == "error_bound" else 0
        )


@given(stacks(subnormal=True))
def test_alone_a_matrix_has_the_norms_it_has_in_a_stack(x):
    together = spectral_estimate(x.A)
    for k in range(len(x.A)):
        alone = spectral_estimate(x.A[k : k + 1])
        for name in ("sigma", "fro"):
            assert near(getattr(alone, name), getattr(together, name)[k : k + 1].double(), 1e-4, x), name


@given(st.lists(stacks(subnormal=True), min_size=1, max_size=4))
def test_stacks_of_all_kinds_are_measured_in_one_solve(several):
    wholes = [ShardedStack.whole(x.A.to(compute_dtype(x.A.dtype))) for x in several]
    found = run_local(spectral_estimates(wholes, 0.01))
    for x, e in zip(several, found, strict=True):
        assert e.sigma.dtype == compute_dtype(x.A.dtype)
        assert as_alone(e, x)
        assert bool(((e.sigma_low.double() <= x.truth) & (x.truth <= e.sigma_high.double())).all())


# --- in several processes


@st.composite
def cuts(draw: st.DrawFn, size: int, count: int) -> list[slice]:
    """A dimension cut into so many stretches, some of them empty."""
    ends = [0, *sorted(draw(st.lists(st.integers(0, size), min_size=count - 1, max_size=count - 1))), size]
    return [slice(start, end) for start, end in pairwise(ends)]


@given(stacks(subnormal=True), st.integers(1, 4), st.data())
def test_pieces_in_several_processes_have_the_norms_of_the_whole(x, processes, data):
    A = x.A.to(compute_dtype(x.A.dtype))
    K, m, n = A.shape
    dim = data.draw(st.sampled_from([1, 2]))
    where = data.draw(cuts((m, n)[dim - 1], processes))
    everything = slice(None)

    def job(member):
        rows, columns = (where[member.rank], everything) if dim == 1 else (everything, where[member.rank])
        mine = A[:, rows, columns].clone()
        parts = (Shard(None, rows, columns, mine),) if mine.numel() else ()
        stack = ShardedStack((K, m, n), parts, (dim == 1, dim == 2), member, A.new_empty(0))
        return run(spectral_estimates([stack], 0.01), member)[0]

    for e in Room(processes).run(job):
        assert as_alone(e, x)
        assert near(e.fro, x.fro, rounding(x), x)
        assert bool(((e.sigma_low.double() <= x.truth) & (x.truth <= e.sigma_high.double())).all())


@given(st.lists(st.lists(st.floats(-10, 10), min_size=0, max_size=5), max_size=5), st.booleans())
def test_routines_that_run_together_get_their_own_sums(numbers, together):
    def routine(mine):
        total = 0.0
        for number in mine:
            (answer,) = yield [torch.tensor([number], dtype=torch.float64)]
            total += float(answer)
        return total

    whole = run_local((gather if together else sequence)([routine(mine) for mine in numbers]))
    assert whole == [sum(mine) for mine in numbers]


@given(shapes(), st.data())
def test_rows_of_every_length_are_summed_to_their_last_digits(shape, data):
    m, n = shape
    A = placed(data.draw(spectra(min(m, n))), m, n, orthogonal(m, 0), orthogonal(n, 1)).float()[None]
    exact = math.sqrt(math.fsum(float(a) ** 2 for a in A.flatten()))
    assert abs(float(frobenius(A)) - exact) <= 1e-6 * exact + 1e-30
