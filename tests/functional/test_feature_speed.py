"""The Feature Speed Formula: angles by construction, sums by numpy in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import spectral_monitor.functional as F
from spectral_monitor.functional import feature_speed
from spectral_monitor.functional.feature_speed import angle_from_sums, angle_sums, inner, inner_sums
from tests.functional.made import Made

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def gaussian(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def at_angle(angle, *shape, dtype=torch.float32):
    """``dh`` and ``b`` with ``angle`` between ``dh`` and ``-b``."""
    b, other = gaussian(*shape, dtype=torch.float64), gaussian(*shape, dtype=torch.float64, seed=1)
    perpendicular = other - (other * b).sum() / (b * b).sum() * b
    dh = -math.cos(angle) * b / b.norm() + math.sin(angle) * perpendicular / perpendicular.norm()
    return (3e-3 * dh).to(dtype), b.to(dtype)


def naive_cosine(dh, b):
    dh, b = dh.double().numpy(), b.double().numpy()
    return -(dh * b).sum() / math.sqrt((dh**2).sum() * (b**2).sum())


def naive_sensitivity(dh, b):
    dh, b = dh.double().numpy(), b.double().numpy()
    return math.sqrt((dh**2).mean()) / -(b * dh).sum()


MEASURES = {
    "backward_feature_cosine": (F.backward_feature_cosine, naive_cosine),
    "backward_feature_angle": (F.backward_feature_angle, lambda dh, b: math.acos(naive_cosine(dh, b))),
    "sensitivity": (F.sensitivity, naive_sensitivity),
    "contribution": (F.contribution, lambda dh, b: -(dh.double() * b.double()).sum().item()),
    "angle of sums": (lambda dh, b: angle_from_sums(*angle_sums(dh, b)), lambda dh, b: math.acos(naive_cosine(dh, b))),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(7,), (1, 9), (9, 1), (30, 40), (2, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("name", MEASURES)
def test_equals_numpy(name, shape, dtype):
    measure, naive = MEASURES[name]
    dh, b = at_angle(1.1, *shape, dtype=dtype)
    value = measure(dh, b)
    assert value.shape == ()
    assert value.dtype == (torch.float64 if torch.float64 in (dtype, value.dtype) else torch.float32)
    assert value.item() == pytest.approx(naive(dh, b), rel=1e-12 if dtype == torch.float64 else 5e-6)


@pytest.mark.parametrize("angle", [1e-4, 1e-3, 0.3, math.pi / 2, 2.5, math.pi - 1e-3, math.pi - 1e-4])
@pytest.mark.parametrize("measure", [F.backward_feature_angle, MEASURES["angle of sums"][0]], ids=["rows", "sums"])
def test_angles_of_float32_features(measure, angle):
    value = measure(*at_angle(angle, 64, 48)).item()
    assert min(value, math.pi - value) == pytest.approx(min(angle, math.pi - angle), rel=1e-2)
    assert value == pytest.approx(angle, abs=1e-6)


@pytest.mark.parametrize(
    ("measure", "smallest"), [(F.backward_feature_angle, 1e-12), (MEASURES["angle of sums"][0], 1e-6)]
)
def test_tiny_angles_of_float64_features(measure, smallest):
    for angle in (smallest, 10 * smallest):
        assert measure(*at_angle(angle, 64, 48, dtype=torch.float64)).item() == pytest.approx(angle, rel=1e-2)


def test_angle_does_not_depend_on_scale_or_shape():
    dh, b = at_angle(0.7, 6, 8)
    for a, c, shape in [(1e-10, 1e6, (6, 8)), (1, 1, (48,)), (1e15, 1e-15, (2, 3, 8))]:
        assert F.backward_feature_angle((a * dh).reshape(shape), (c * b).reshape(shape)).item() == pytest.approx(0.7)


def test_angle_sums_add_up_over_batches():
    parts = [at_angle(angle, rows, 5) for angle, rows in [(0.2, 1), (0.9, 7), (3.0, 4)]]
    parts[0][0].requires_grad_()
    added = [sum(column) for column in zip(*(angle_sums(*part) for part in parts), strict=True)]
    assert not any(one.requires_grad for one in added)
    parts[0][0].requires_grad_(False)
    dh, b = (torch.cat(column) for column in zip(*parts, strict=True))
    assert angle_from_sums(*added).item() == pytest.approx(math.acos(naive_cosine(dh, b)), rel=1e-6)


def test_gradient_descent_on_one_layer():
    """The formula itself: for h = x W^T and a step on W alone, -<b, dh> = -<g, dW> = lr |g|^2."""
    x, b, lr = gaussian(20, 6, dtype=torch.float64), gaussian(20, 4, dtype=torch.float64, seed=1), 0.1
    g = b.T @ x
    dW = -lr * g
    dh = x @ dW.T
    decrease = lr * (g.numpy() ** 2).sum()
    assert F.contribution(g, dW).item() == pytest.approx(decrease, rel=1e-12)
    cosine = F.backward_feature_cosine(dh, b)
    assert 0 < F.backward_feature_angle(dh, b) < math.pi / 2
    assert (cosine * dh.norm() * b.norm()).item() == pytest.approx(decrease, rel=1e-12)
    assert (dh.square().mean().sqrt() / F.sensitivity(dh, b)).item() == pytest.approx(decrease, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_inner_of_many_entries_keeps_its_digits(dtype):
    """Longer than one chunk, and not a multiple of it."""
    a = (gaussian(5 * (1 << 17) + 3) + 10).to(dtype)
    expected = (a.double().numpy() ** 2).sum()
    assert inner(a, a).item() == pytest.approx(expected, rel=3e-5)
    assert inner(a, a, torch.float64).item() == pytest.approx(expected, rel=1e-12)


ZERO, ONE = torch.zeros(3, 2), torch.ones(3, 2)


@pytest.mark.parametrize(
    ("dh", "b"), [(ZERO, ONE), (ONE, ZERO), (ZERO, ZERO), (ZERO[:0], ZERO[:0]), (ZERO[:, :0],) * 2]
)
@pytest.mark.parametrize("name", MEASURES)
def test_zero_and_empty(name, dh, b):
    value = MEASURES[name][0](dh, b).item()
    if name == "contribution":
        assert value == 0
    else:
        assert math.isnan(value)


@pytest.mark.parametrize("name", ["backward_feature_cosine", "backward_feature_angle", "angle of sums", "contribution"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("argument", [0, 1])
def test_bad_entries_are_not_hidden(name, bad, argument):
    arguments = [gaussian(4, 5), gaussian(4, 5, seed=1)]
    arguments[argument][2, 3] = bad
    value = MEASURES[name][0](*arguments)
    if name == "contribution" and math.isinf(bad):
        assert value.isinf()
    else:
        assert value.isnan()


def test_nan_makes_sensitivity_nan():
    for arguments in [(ONE * math.nan, ONE), (ONE, ONE * math.nan)]:
        assert F.sensitivity(*arguments).isnan()


@pytest.mark.parametrize("scale", [1e24, 1e-30])
def test_features_that_cannot_be_squared_have_an_angle(scale):
    """An angle of 0 would say: perfectly aligned."""
    dh, b = at_angle(1.0, 4, 4)
    assert F.backward_feature_angle(dh * scale, b).item() == pytest.approx(1, rel=1e-5)
    assert angle_from_sums(*angle_sums(dh * scale, b)).item() == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("scale", [1e200, 1e-200, 1e-155])
def test_sums_that_leave_float64_have_no_angle(scale):
    """One of pi / 2 would say: no descent at all."""
    dh, b = at_angle(1.0, 4, 4, dtype=torch.float64)
    assert angle_from_sums(*angle_sums(dh * scale, b)).isnan()
    assert F.backward_feature_angle(dh * scale, b).item() == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize("name", MEASURES)
@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (ONE, ONE.T, r"(dh|g) \(3, 2\) and (b|dW) \(2, 3\) must have one shape"),
        (ONE, ONE[:1], r"(dh|g) \(3, 2\) and (b|dW) \(1, 2\)"),
        (ONE.long(), ONE.long(), r"(dh|g) .*int64.* must be real .*\(3, 2\)"),
        (ONE, ONE.to(torch.complex64), r"and (b|dW) .*complex64.* must be real .*\(3, 2\)"),
    ],
)
def test_bad_arguments_are_named(name, first, second, message):
    with pytest.raises(ValueError, match=message):
        MEASURES[name][0](first, second)


def test_inner_of_unlike_shapes_is_refused():
    with pytest.raises(ValueError, match=r"\(3, 2\) and \(2, 3\)"):
        inner(ONE, ONE.T)


@pytest.mark.parametrize("name", MEASURES)
def test_touches_neither_inputs_nor_the_random_state(name):
    dh, b = (x.requires_grad_() for x in at_angle(1.0, 8, 8))
    copies, rng = [dh.detach().clone(), b.detach().clone()], torch.get_rng_state()
    value = MEASURES[name][0](dh, b)
    assert torch.equal(torch.get_rng_state(), rng)
    assert torch.equal(dh, copies[0])
    assert torch.equal(b, copies[1])
    assert not value.requires_grad


def test_mixed_precisions_are_promoted():
    dh, b = at_angle(0.5, 8, 8)
    for name, (measure, naive) in MEASURES.items():
        value = measure(dh.bfloat16(), b)
        np.testing.assert_allclose(value.item(), naive(dh.bfloat16(), b), rtol=1e-5, err_msg=name)
        assert measure(dh, b.double()).dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inner_sums_are_those_of_numpy_however_long_pairs_are(dtype):
    shapes = [[(7,)], [(300, 1000), (5, 3)], [], [(4096,)], [(4097,)], [(700, 900)]]  # one, several, none; short, long
    pairs = [
        [(gaussian(*shape, dtype=dtype, seed=k), gaussian(*shape, seed=10 + k)) for k, shape in enumerate(some)]
        for some in shapes
    ]
    found = inner_sums(pairs, torch.float32)
    assert found.dtype == torch.float32
    for value, some in zip(found.tolist(), pairs, strict=True):
        expected = sum((a.double().numpy() * b.double().numpy()).sum() for a, b in some)
        scale = sum(float(a.double().norm() * b.double().norm()) for a, b in some)
        assert value == pytest.approx(expected, abs=1e-7 * scale)


def test_inner_sums_of_nothing_are_zero():
    assert inner_sums([[], []], torch.float32).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("chunk", [1, 10, 1 << 18])
@pytest.mark.parametrize("copied", [0, 1, 30, 1 << 16])
@pytest.mark.parametrize("short", [0, 60, 1 << 12])
def test_products_do_not_depend_on_how_many_are_made_at_a_time(monkeypatch, chunk, copied, short):
    """Neither of what lies in order nor of what is transposed or a part of something larger."""
    for name, value in (("_CHUNK", chunk), ("_COPIED", copied), ("_SHORT", short)):
        monkeypatch.setattr(feature_speed, name, value)
    kept = gaussian(12, 4, 10, dtype=torch.float64)
    for a in (
        kept,
        kept.transpose(0, 2),
        kept[:1],
        kept[::5, :, ::3],
        kept[0],
        kept[0].T,
        kept[:, 0, 0],
        kept[0, 0, 0],
    ):
        b = gaussian(a.numel(), dtype=torch.float64, seed=1).reshape(a.shape)
        expected = float((a.numpy() * b.numpy()).sum())
        assert inner(a, b).item() == pytest.approx(expected, rel=1e-12)
        found = inner_sums([[(a, b), (a, a)], [], [(b, b)]], torch.float64)
        assert found.tolist() == pytest.approx([expected + float((a * a).sum()), 0, float((b * b).sum())], rel=1e-12)


def test_what_lies_in_another_order_is_copied_a_part_at_a_time(monkeypatch):
    monkeypatch.setattr(feature_speed, "_CHUNK", 100)
    monkeypatch.setattr(feature_speed, "_COPIED", 100)
    a, b = gaussian(40, 30).T, gaussian(30, 40, seed=1)
    with Made() as made:
        inner(a, b)
    assert made.largest <= 100
    assert made.calls["dot"] == 15  # of two rows of 40 each


def test_short_pairs_are_multiplied_side_by_side():
    """Their number costs no operation; long ones are one each."""

    def dots(lengths):
        with Made() as made:
            inner_sums([[(gaussian(n), gaussian(n, seed=1)) for n in lengths]], torch.float32)
        return made.calls.get("dot", 0)

    assert dots([1, 7, 4096]) == 0
    assert dots([4097]) == 1
    assert dots([5000, 3, 4096, 6000]) == 2
