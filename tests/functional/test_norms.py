"""Norms against a second implementation: numpy's SVD of the float64 matrices."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch

import spectral_monitor.functional as F

HALF = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, torch.float64, *HALF)
SHAPES = [(1, 1), (1, 7), (7, 1), (6, 6), (30, 90), (70, 66), (4, 3, 5), (2, 3, 8, 1), (2, 66, 80)]


def gaussian(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def low_rank(m, n):
    """Like an update: a few directions and a little noise."""
    return gaussian(m, 3, seed=1) @ gaussian(3, n, seed=2) + 0.01 * gaussian(m, n, seed=3)


def naive_spectral(A):
    return np.linalg.svd(A, compute_uv=False)[..., 0]


def naive_fro(A):
    return np.sqrt((A**2).sum((-2, -1)))


def naive_row_rms(A):
    return np.sqrt((A**2).mean(-1))


# name: (function, naive) of two matrices A and B of one shape; most look at A alone.
MEASURES = {
    "spectral_norm": (lambda A, B, **k: F.spectral_norm(A, **k), lambda A, B: naive_spectral(A)),
    "stable_rank": (
        lambda A, B, **k: F.stable_rank(A, **k),
        lambda A, B: (np.linalg.svd(A, compute_uv=False) ** 2).sum(-1) / naive_spectral(A) ** 2,
    ),
    "natural_norm": (
        lambda A, B, **k: F.natural_norm(A, **k),
        lambda A, B: np.sqrt(A.shape[-1] / A.shape[-2]) * naive_spectral(A),
    ),
    "readout": (
        lambda A, B, **k: F.natural_norm(A, "readout", **k),
        lambda A, B: np.sqrt(A.shape[-1] / A.shape[-2]) * naive_spectral(A),
    ),
    "update_ratio": (lambda A, B, **k: F.update_ratio(A, B, **k), lambda A, B: naive_spectral(A) / naive_spectral(B)),
    "drift_ratio": (lambda A, B, **k: F.drift_ratio(A, B, **k), lambda A, B: naive_spectral(A - B) / naive_spectral(B)),
    "frobenius_norm": (lambda A, B: F.frobenius_norm(A), lambda A, B: naive_fro(A)),
    "drift_fro_ratio": (lambda A, B: F.drift_fro_ratio(A, B), lambda A, B: naive_fro(A - B) / naive_fro(B)),
    "embedding": (lambda A, B: F.natural_norm(A, "embedding"), lambda A, B: naive_row_rms(A).max(-1)),
    "vector": (lambda A, B: F.natural_norm(A, "vector"), lambda A, B: naive_row_rms(A)),
}
ESTIMATED = ("spectral_norm", "stable_rank", "natural_norm", "readout", "update_ratio", "drift_ratio")
DRIFTS = ("drift_ratio", "drift_fro_ratio")
OF_ONE_MATRIX = [name for name in MEASURES if name not in ("update_ratio", *DRIFTS)]


def numpy64(x):
    return x.double().numpy()


@pytest.mark.parametrize(
    ("name", "dtype"),
    # Differences of half precision weights have a test of their own.
    [(name, dtype) for name in MEASURES for dtype in DTYPES if not (name in DRIFTS and dtype in HALF)],
    ids=str,
)
def test_equals_the_svd_for_every_shape(name, dtype):
    measure, naive = MEASURES[name]
    for shape in SHAPES:
        A, B = gaussian(*shape, dtype=dtype), gaussian(*shape, dtype=dtype, seed=1)
        exact = {"exact": True} if name in ESTIMATED and min(shape[-2:]) > 64 else {}
        value = measure(A, B, **exact)
        expected = naive(numpy64(A), numpy64(B))
        assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert value.shape == expected.shape
        tolerance = 1e-10 if dtype == torch.float64 else 5e-6
        np.testing.assert_allclose(numpy64(value), expected, rtol=tolerance, err_msg=f"{name} {shape}")


@pytest.mark.parametrize(
    "A",
    [low_rank(80, 200), low_rank(200, 80), gaussian(100, 100), gaussian(70, 300), low_rank(90, 90) * 1e-9],
    ids=["wide", "tall", "square gaussian", "wide gaussian", "small entries"],
)
def test_estimate_is_a_lower_bound_within_tol_and_between_the_bounds(A):
    truth = naive_spectral(numpy64(A))
    for tol in (0.1, 0.01, 1e-4):
        estimate = F.spectral_norm(A, tol=tol).item() / truth
        low, high = (bound.item() / truth for bound in F.spectral_norm_bounds(A, tol=tol))
        assert 1 - tol <= estimate <= 1 + 1e-6
        assert 1 - tol <= low <= 1 <= high
        assert high <= naive_fro(numpy64(A)) / truth * (1 + 1e-3)


def test_bounds_take_no_more_steps_than_the_tolerance_asks_for():
    """An exact one would be as near as rounding allows."""
    A = torch.randn(300, 400, generator=torch.Generator().manual_seed(0))
    low, _ = F.spectral_norm_bounds(A, tol=0.3)
    assert 1e-4 < 1 - float(low) / float(torch.linalg.svdvals(A.double())[0]) < 0.3


def test_bounds_of_a_low_rank_matrix_meet():
    low, high = F.spectral_norm_bounds(torch.stack([low_rank(100, 300), 5 * low_rank(100, 300)]))
    assert low.shape == high.shape == (2,)
    assert bool((high / low < 1.02).all())


def test_bounds_use_the_sums_of_rows_and_columns():
    # All singular values of a permutation are 1: the Frobenius norm is loose, the 1- and inf-norms are tight.
    _, high = F.spectral_norm_bounds(torch.eye(200)[torch.arange(199, -1, -1)])
    assert high.item() == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize(
    ("measure", "A", "expected"),
    [
        (F.spectral_norm, torch.outer(torch.tensor([3.0, 4.0]), torch.ones(9)), 15),
        (F.spectral_norm, torch.full((100, 400), 0.5), 100),
        (F.stable_rank, torch.full((100, 400), 0.5), 1),
        (F.stable_rank, torch.eye(100), 100),
        (F.stable_rank, torch.tensor([[2.0, 0, 0], [0, 1, 0]]), 1.25),
        (F.frobenius_norm, torch.full((50, 8), 0.25), 5),
        (F.natural_norm, torch.full((4, 16), 0.5), 8),  # sqrt(16/4) * 0.5 * sqrt(4 * 16)
        (lambda A: F.natural_norm(A, "embedding"), torch.tensor([[1.0, 1.0], [3.0, 3.0]]), 3),
        (lambda A: F.natural_norm(A, "vector"), torch.tensor([2.0, -2.0, 2.0]), 2),
        (lambda A: F.drift_ratio(A, torch.eye(3)), 4 * torch.eye(3), 3),
    ],
)
def test_closed_forms(measure, A, expected):
    assert measure(A).item() == pytest.approx(expected, rel=1e-5)


def test_natural_norm_is_the_largest_rms_of_an_output():
    W = gaussian(12, 40)
    x = torch.linalg.svd(W.double())[2][0]
    x = x / x.square().mean().sqrt()
    assert F.natural_norm(W).item() == pytest.approx((W.double() @ x).square().mean().sqrt().item(), rel=1e-5)


@pytest.mark.parametrize("name", MEASURES)
def test_zero_matrix(name):
    zero, one = torch.zeros(4, 6), torch.ones(4, 6)
    against_zero = MEASURES[name][0](zero, zero).flatten()
    if name in ("stable_rank", "update_ratio", *DRIFTS):
        assert bool(against_zero.isnan().all())
    else:
        assert bool((against_zero == 0).all())
    if name in ("update_ratio", *DRIFTS):
        assert MEASURES[name][0](zero, one).item() == pytest.approx(0 if name == "update_ratio" else 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("shape", [(3, 4, 5), (3, 70, 80)], ids=str)
@pytest.mark.parametrize("name", MEASURES)
def test_bad_entries_spoil_their_own_matrix_only(name, shape, bad):
    A, B = gaussian(*shape), gaussian(*shape, seed=1)
    clean = MEASURES[name][0](A, B)
    A[1, 2, 3] = bad
    value = MEASURES[name][0](A, B)
    unlike_a_number = value.isnan() if math.isnan(bad) or name in ESTIMATED else value.isinf()
    assert unlike_a_number.reshape(3, -1).any(1).tolist() == [False, True, False]
    # The number of Lanczos steps is shared, so neighbours may move within the tolerance.
    torch.testing.assert_close(value[[0, 2]], clean[[0, 2]], rtol=0.01, atol=0)


@pytest.mark.parametrize("shape", [(4, 5), (70, 80)], ids=str)
@pytest.mark.parametrize("scale", [1e-40, 1e-25, 1e-15, 1e15, 1e25, 1e37])
def test_spectral_norm_of_extreme_entries(scale, shape):
    A = (gaussian(*shape, dtype=torch.float64) * scale).float()
    truth = naive_spectral(numpy64(A))
    assert F.spectral_norm(A, tol=1e-3).item() == pytest.approx(truth, rel=2e-3)
    low, high = F.spectral_norm_bounds(A)
    assert low.item() <= truth <= high.item() * (1 + 1e-5)


@pytest.mark.parametrize("scale", [1e-25, 1e25])
@pytest.mark.parametrize("name", ["stable_rank", "frobenius_norm", "embedding", "vector"])
def test_other_norms_of_extreme_entries(name, scale):
    A = (gaussian(4, 5, dtype=torch.float64) * scale).float()
    np.testing.assert_allclose(numpy64(MEASURES[name][0](A, A)), MEASURES[name][1](numpy64(A), None), rtol=1e-3)


@pytest.mark.parametrize("name", DRIFTS)
@pytest.mark.parametrize(
    ("W", "W0", "expected"),
    [
        pytest.param(torch.tensor([[256.0]]).bfloat16(), torch.tensor([[-1.0]]).bfloat16(), 257, id="rounding"),
        pytest.param(torch.tensor([[6e4]]).half(), torch.tensor([[-6e4]]).half(), 2, id="overflow"),
    ],
)
def test_drift_of_half_precision_weights_is_measured_in_float32(name, W, W0, expected):
    assert MEASURES[name][0](W, W0).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((0, 3, 4), torch.zeros(0)),
        ((0, 4), torch.tensor(0.0)),
        ((4, 0), torch.tensor(0.0)),
        ((2, 0, 3), torch.zeros(2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", [name for name in OF_ONE_MATRIX if name != "vector"])
def test_empty_matrices_have_norm_zero(name, shape, expected):
    value = MEASURES[name][0](torch.zeros(shape), None)
    torch.testing.assert_close(value, expected * math.nan if name == "stable_rank" else expected, equal_nan=True)


integers = torch.ones(3, 3, dtype=torch.int64)
NEED_MATRICES = {name: measure for name, (measure, _) in MEASURES.items() if name != "vector"}
NEED_MATRICES["spectral_norm_bounds"] = lambda A, B: torch.stack(F.spectral_norm_bounds(A))


@pytest.mark.parametrize(
    "bad",
    [integers, integers.to(torch.complex64), torch.ones(3), torch.tensor(1.0)],
    ids=["int", "complex", "1d", "0d"],
)
@pytest.mark.parametrize("name", NEED_MATRICES)
def test_what_is_no_real_matrix_is_refused_with_its_shape(name, bad):
    with pytest.raises(ValueError, match=rf"(A|W) must be real .*{bad.dtype} {re.escape(str(tuple(bad.shape)))}"):
        NEED_MATRICES[name](bad, bad)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: F.natural_norm(integers, "vector"), r"vector must be real floating-point.*int64 \(3, 3\)"),
        (lambda: F.natural_norm(torch.tensor(1.0), "vector"), r"vector must be .*\(\)"),
        (lambda: F.natural_norm(torch.ones(2, 2), "bias"), "unknown role 'bias'; valid roles: operator, embedding"),
        (lambda: F.update_ratio(torch.ones(2, 3), torch.ones(3, 2)), r"dW \(2, 3\) and W \(3, 2\)"),
        (lambda: F.drift_ratio(torch.ones(3, 3), torch.ones(3, 1)), r"\(3, 3\) and .*\(3, 1\)"),
        (lambda: F.drift_ratio(torch.ones(2, 3), torch.ones(3, 2)), r"W \(2, 3\) and W0 \(3, 2\)"),
        (lambda: F.drift_fro_ratio(torch.ones(3, 3), torch.ones(3, 1)), r"W \(3, 3\) and W0 \(3, 1\)"),
        *(
            (lambda tol=tol: F.spectral_norm(torch.ones(2, 2), tol=tol), r"tol must be in \(0, 1\)")
            for tol in (0, 1, -0.1, math.nan)
        ),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("shape", [(5, 6), (66, 70)], ids=str)
@pytest.mark.parametrize("measure", [*NEED_MATRICES.values(), MEASURES["vector"][0]], ids=[*NEED_MATRICES, "vector"])
def test_touches_neither_inputs_nor_the_random_state(measure, shape):
    A, B = gaussian(*shape).requires_grad_(), gaussian(*shape, seed=1)
    copy, rng = A.detach().clone(), torch.get_rng_state()
    first, second = measure(A, B), measure(A, B)
    assert torch.equal(torch.get_rng_state(), rng)
    assert torch.equal(A, copy)
    assert torch.equal(first, second)
    assert not first.requires_grad


def test_views_are_measured_like_copies():
    A = gaussian(2, 70, 90)[:, ::2]
    torch.testing.assert_close(F.spectral_norm(A.mT), F.spectral_norm(A.contiguous()), rtol=0.01, atol=0)
    torch.testing.assert_close(F.frobenius_norm(A.mT), F.frobenius_norm(A.contiguous()))


@pytest.mark.parametrize("measure", [F.spectral_norm, F.stable_rank, F.natural_norm])
def test_by_default_a_norm_is_an_estimate(measure):
    """A decomposition of every matrix would take most of the time of a measured step."""
    A = torch.randn(300, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert 1e-12 < abs(float(measure(A) / measure(A, exact=True)) - 1) < 0.02
