"""Entries whose squares leave the range of their dtype: what depends on no scale must not notice."""

from __future__ import annotations

import math

import pytest
import torch

import spectral_monitor.functional as F
from spectral_monitor.functional import vector_norms as module
from spectral_monitor.functional.vector_norms import common_dtype, largest, lengths, whole_length
from tests.functional.made import Made


def gaussian(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# As functions of two tensors of one shape: how the value grows with the scale of the first and of the second.
MEASURES = {
    "alignment": (lambda a, b: F.alignment(a, b, exact=True), 0, 0),
    "backward_feature_angle": (F.backward_feature_angle, 0, 0),
    "backward_feature_cosine": (F.backward_feature_cosine, 0, 0),
    "sensitivity": (F.sensitivity, 0, -1),
    "sample_share": (F.sample_share, 0, 0),
    "activation_ratio": (F.activation_ratio, -1, 1),
    "feature_rms": (lambda a, b: F.feature_rms(a), 1, 0),
    "vector": (lambda a, b: F.natural_norm(a.flatten(), "vector"), 1, 0),
    "embedding": (lambda a, b: F.natural_norm(a, "embedding"), 1, 0),
}
TOGETHER = {
    "relative_change": F.relative_change,
    "kernel_change": F.kernel_change,
    "kernel_alignment": F.kernel_alignment,
    "linearity": lambda a, b: F.linearity(a, b, a.flip(0)),
    "backward_speed": F.backward_speed,
    "feature_cancellation": F.feature_cancellation,
}
SCALES = {torch.float32: (1e-36, 1e-22, 1e-15, 1e15, 1e25, 1e30), torch.float64: (1e-300, 1e-160, 1e155, 1e300)}
CASES = [(dtype, 2.0 ** round(math.log2(scale))) for dtype, scales in SCALES.items() for scale in scales]


@pytest.mark.parametrize(("dtype", "scale"), CASES, ids=lambda x: f"{x:.0e}" if isinstance(x, float) else str(x))
@pytest.mark.parametrize("name", MEASURES)
def test_of_either_argument(name, dtype, scale):
    measure, first, second = MEASURES[name]
    a, b = gaussian(9, 6, dtype=dtype), gaussian(9, 6, dtype=dtype, seed=1)
    value = measure(a, b)
    for found, power in ((measure(scale * a, b), first), (measure(a, scale * b), second)):
        assert found.dtype == dtype
        assert (found / scale**power).item() == pytest.approx(value.item(), rel=1e-5)


@pytest.mark.parametrize(("dtype", "scale"), CASES, ids=lambda x: f"{x:.0e}" if isinstance(x, float) else str(x))
@pytest.mark.parametrize("name", TOGETHER)
def test_of_both_arguments(name, dtype, scale):
    measure = TOGETHER[name]
    a, b = gaussian(9, 6, dtype=dtype), gaussian(9, 6, dtype=dtype, seed=1)
    found = measure(scale * a, scale * b)
    assert found.dtype == dtype
    assert found.item() == pytest.approx(measure(a, b).item(), rel=1e-5)


def test_alignment_where_one_makes_up_for_the_other():
    A, x = gaussian(5, 6), gaussian(20, 6, seed=1)
    expected = F.alignment(A, x).item()
    for scale in (2.0**-70, 2.0**70):
        assert F.alignment(A * scale, x / scale).item() == pytest.approx(expected, rel=1e-5)


def test_rows_each_of_their_own_size():
    x, A = gaussian(3, 6), gaussian(5, 6, seed=1)
    sizes = torch.tensor([2.0**-100, 1.0, 2.0**100])[:, None]
    assert F.alignment(A, sizes * x).item() == pytest.approx(F.alignment(A, x).item(), rel=1e-5)
    after = x + gaussian(3, 6, seed=2)
    assert F.relative_change(sizes * x, sizes * after).item() == pytest.approx(F.relative_change(x, after).item())


def test_half_precision_keeps_its_smallest_numbers():
    h = torch.full((3, 4), 1e-38, dtype=torch.bfloat16)
    assert F.feature_rms(h).item() == pytest.approx(float(h[0, 0]), rel=1e-5, abs=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(), (7,), (1, 700), (40, 30), (1, 30, 20), (3, 4, 5, 6), (0, 4), (4, 0), (0,)])
@pytest.mark.parametrize("chunk", [1, 64])
def test_lengths_of_chunks_are_those_of_the_whole(shape, dtype, chunk, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", chunk)
    x = gaussian(math.prod(shape), dtype=dtype).reshape(shape)
    exact = x.double()
    assert whole_length(x).item() == pytest.approx(exact.norm().item(), rel=1e-12)
    if x.ndim:
        found = lengths(x)
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, exact.norm(dim=-1), rtol=1e-12, atol=0)
    if x.ndim > 1:
        torch.testing.assert_close(lengths(x.mT), exact.norm(dim=-2), rtol=1e-12, atol=0)


def test_lengths_copy_a_portion_at_a_time(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 64)
    x = gaussian(40, 30, dtype=torch.float64)
    with Made() as made:
        lengths(x)
    assert 60 <= made.largest <= 64  # two rows


def test_bad_rows_keep_to_themselves():
    x = torch.tensor([[math.nan, 1.0], [math.inf, 1.0], [0.0, 0.0], [3.0, 4.0]], dtype=torch.float64)
    torch.testing.assert_close(lengths(x), torch.tensor([math.nan, math.inf, 0, 5]).double(), equal_nan=True)
    torch.testing.assert_close(lengths(x.float()), lengths(x), equal_nan=True)
    assert largest(x, 1).flatten().tolist() == [1, 1, 1, 4]
    assert largest(x).item() == largest(x[:0]).item() == 1


def test_dtypes_are_promoted():
    half, single, double = (torch.zeros(2, dtype=d) for d in (torch.bfloat16, torch.float32, torch.float64))
    assert common_dtype(half) == common_dtype(half, single) == torch.float32
    assert common_dtype(half, double) == common_dtype(double, single) == torch.float64
    a, b = gaussian(9, 6), gaussian(9, 6, seed=1)
    two = {**TOGETHER, **{name: measure for name, (measure, _, _) in MEASURES.items()}}
    for name in (*TOGETHER, "alignment", "sample_share", "activation_ratio"):
        for first, second in ((a.bfloat16(), b.double()), (a.double(), b.bfloat16())):
            found = two[name](first, second)
            assert found.dtype == torch.float64, name
            assert found.item() == pytest.approx(two[name](first.double(), second.double()).item(), rel=1e-5), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_autocast_changes_nothing(dtype):
    a, b = gaussian(40, 30, dtype=dtype), gaussian(40, 30, dtype=dtype, seed=1)
    two = {**TOGETHER, **{name: measure for name, (measure, _, _) in MEASURES.items()}}
    for name, measure in two.items():
        plain = measure(a, b)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(measure(a, b), plain), name


def test_numbers_of_float32_are_those_of_float64():
    a, b = (gaussian(40, 30, dtype=torch.float64, seed=seed) for seed in range(2))
    two = {**TOGETHER, **{name: measure for name, (measure, _, _) in MEASURES.items()}}
    for name, measure in two.items():
        assert measure(a.float(), b.float()).item() == pytest.approx(measure(a, b).item(), rel=1e-5), name


def test_a_row_that_becomes_nan_is_not_left_out():
    before, after = gaussian(4, 5), gaussian(4, 5, seed=1)
    before[1] = 0
    assert F.relative_change(before, after).isfinite()
    after[1, 2] = math.nan
    assert F.relative_change(before, after).isnan()
    after[1, 2] = math.inf
    assert not F.relative_change(before, after).isfinite()
