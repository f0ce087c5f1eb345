"""Formulas of features and gradients on drawn rows of all sizes, against float64 loops, and what holds between them."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import spectral_monitor.functional as F
from spectral_monitor.functional.feature_speed import angle_from_sums, angle_sums, inner, inner_sums
from spectral_monitor.linalg import compute_dtype
from tests.properties.drawn import DTYPES, orthogonal, seeds, units


@st.composite
def features(draw: st.DrawFn, rows: int, width: int) -> Tensor:
    """Features (rows, width), float64 and of order 1; some of the rows may be 0."""
    generator = torch.Generator().manual_seed(draw(seeds))
    h = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    kind = draw(st.sampled_from(["gaussian", "gaussian", "alike", "sparse", "uneven", "zero"]))
    if kind == "alike":
        h = h[:1] + draw(st.floats(0, 1e-2)) * h
    elif kind == "sparse":
        h = h.relu() * (torch.rand(rows, 1, generator=generator) < 0.7)
    elif kind == "uneven":
        h = h * 10.0 ** torch.linspace(-3, 0, rows, dtype=torch.float64)[:, None]
    elif kind == "zero":
        h = torch.zeros_like(h)
    return h


class Pair:
    """Two tensors of one shape and dtype: as they are measured (a, b), and over their units in float64 (x, y)."""

    def __init__(self, a: Tensor, b: Tensor, dtype: torch.dtype, units: tuple[float, float]) -> None:
        self.dtype, self.units = dtype, units
        self.a, self.b = ((t * unit).to(dtype) for t, unit in zip((a, b), units, strict=True))
        self.x, self.y = (t.double() / unit for t, unit in zip((self.a, self.b), units, strict=True))
        self.eps = torch.finfo(compute_dtype(dtype)).eps

    def __repr__(self) -> str:
        return f"Pair({self.dtype}, units={self.units}, x={self.x}, y={self.y})"

    def agrees(self, found: Tensor, expected: Tensor | float, off: float = 16) -> bool:
        """Close but for so many roundings, of the size of the number or 1; NaN where NaN is expected."""
        expected = float(expected)
        assert found.dtype == compute_dtype(self.dtype)
        if math.isnan(expected):
            return bool(found.isnan())
        return abs(float(found) - expected) <= off * self.eps * max(1.0, abs(expected))


@st.composite
def pairs(draw: st.DrawFn, one_unit: bool = False) -> Pair:
    """Two of a shape, each at a size of its own over the decades of their dtype."""
    rows, width, dtype = draw(st.integers(1, 12)), draw(st.integers(1, 12)), draw(st.sampled_from(DTYPES))
    first = draw(units(dtype))
    second = first if one_unit else draw(units(dtype))
    return Pair(draw(features(rows, width)), draw(features(rows, width)), dtype, (first, second))


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def over(a: Tensor, b: Tensor) -> float:
    return float(a / b) if b != 0 else math.nan


# --- rows


@given(pairs(one_unit=True))
def test_sizes_of_features(p):
    assert p.agrees(F.feature_rms(p.a) / p.units[0], p.x.square().mean().sqrt())
    ratios = [float(y.norm() / x.norm()) for x, y in zip(p.x, p.y, strict=True) if x.norm() > 0]
    assert p.agrees(F.activation_ratio(p.a, p.b), mean(ratios), 64)


@given(pairs(one_unit=True))
def test_changes_are_means_over_rows(p):
    rows = [(x, y) for x, y in zip(p.x, p.y, strict=True) if x.norm() > 0]
    # A difference of close numbers is rounded relative to them, not to itself.
    ratios = [float((y - x).norm() / x.norm()) for x, y in rows]
    assert p.agrees(F.relative_change(p.a, p.b), mean(ratios))
    known = [(x, y) for x, y in zip(p.x, p.y, strict=True) if x.norm() + y.norm() > 0]
    parts = [float((x + y).norm() / (x.norm() + y.norm())) for x, y in known]
    found = F.feature_cancellation(p.a, p.b)
    assert p.agrees(found, mean(parts))
    assert bool(found.isnan()) or 0 <= float(found) <= 1


@given(pairs(one_unit=True))
def test_changes_of_kernels_are_those_of_all_inner_products(p):
    before, after = p.x @ p.x.T, p.y @ p.y.T
    expected = over((after - before).norm(), before.norm())
    size = math.nan if math.isnan(expected) else 1 + over(p.y.norm(), p.x.norm()) ** 2 * len(p.x)
    found = F.kernel_change(p.a, p.b)
    assert bool(found.isnan()) if math.isnan(expected) else abs(float(found) - expected) <= 64 * p.eps * size


@given(pairs(), seeds)
def test_rotated_or_grown_features_have_the_kernel_they_had(p, seed):
    turned = p.x @ orthogonal(p.x.shape[1], seed)
    nothing = bool((p.x == 0).all())
    assert bool(F.kernel_change(p.x, turned).isnan()) if nothing else float(F.kernel_change(p.x, turned)) <= 1e-13
    assert bool(F.kernel_alignment(p.x, p.y).isnan()) or 0 <= float(F.kernel_alignment(p.x, p.y)) <= 1
    spread = float((p.x - p.x.mean(0)).norm())
    if spread > 1e-6:
        alike = F.kernel_alignment(p.x, 3 * turned + torch.randn(p.x.shape[1], dtype=torch.float64))
        assert abs(float(alike) - 1) <= 1e-7


@given(pairs())
def test_alignment_of_kernels_is_their_centered_cosine(p):
    rows = len(p.x)
    C = torch.eye(rows, dtype=torch.float64) - 1 / rows
    first, second = C @ p.x @ p.x.T @ C, C @ p.y @ p.y.T @ C
    sizes = (first.norm() / (1 + p.x.norm() ** 2), second.norm() / (1 + p.y.norm() ** 2))
    if min(sizes) > 1e-3:  # of rows that are all alike only rounding is left
        expected = over((first * second).sum(), first.norm() * second.norm())
        assert abs(float(F.kernel_alignment(p.a, p.b)) - expected) <= 1e5 * p.eps


@given(pairs(one_unit=True), st.floats(-2, 2))
def test_linearity_is_the_part_that_the_tangent_does_not_explain(p, share):
    """All of it, where outputs moved along the tangent; and as much as is missing of it."""
    change = p.y - p.x
    found = F.linearity(p.x, p.y, (1 + share) * change)
    assert bool(found.isnan()) if bool((change == 0).all()) else abs(float(found) - abs(share)) <= 1e-12
    nothing = torch.zeros_like(p.a)
    assert p.agrees(F.linearity(p.a, p.b, nothing), math.nan if bool((change == 0).all()) else 1.0)


# --- a matrix and its inputs


@given(pairs(), st.integers(1, 12), seeds, units(torch.float32))
def test_alignment_is_the_mean_stretch_of_rows(p, m, seed, unit):
    A = torch.randn(m, p.x.shape[1], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    W = (A * unit).float()
    exact = W.double() / unit
    norm = torch.linalg.matrix_norm(exact, 2)
    ratios = [float((exact @ x).norm() / norm / x.norm()) for x in p.x if x.norm() > 0]
    found = F.alignment(W, p.a)
    expected = mean(ratios)
    assert bool(found.isnan()) if math.isnan(expected) else abs(float(found) - expected) <= 1e-5
    assert bool(found.isnan()) or 0 <= float(found) <= 1
    leading = torch.linalg.svd(exact)[2][:1]
    assert abs(float(F.alignment(exact, leading)) - 1) <= 1e-6


@given(pairs(), st.integers(1, 12), seeds)
def test_shares_of_rows_in_what_the_gradient_does_to_them(p, m, seed):
    b = torch.randn(len(p.x), m, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    g = b.T @ p.x
    rows = [(b[i], x) for i, x in enumerate(p.x)]
    sizes = [(float(own.norm() * x.norm() ** 2), float((g @ x).norm())) for own, x in rows]
    found = F.sample_share(p.x * p.units[0], b)
    ratios = [own / whole for own, whole in sizes if whole]
    if all(whole > 1e-9 * own for own, whole in sizes):  # not where rows cancel
        assert bool(found.isnan()) if not ratios else abs(float(found) - mean(ratios)) <= 1e-5 * mean(ratios)


# --- the angle between what moved and what should have


@given(pairs())
def test_the_angle_is_that_of_the_two_vectors(p):
    u, v = p.x.flatten(), -p.y.flatten()
    known = bool(u.norm() * v.norm() > 0)
    expected = math.nan
    if known:
        u, v = u / u.norm(), v / v.norm()
        expected = 2 * math.atan2(float((u - v).norm()), float((u + v).norm()))
    assert p.agrees(F.backward_feature_angle(p.a, p.b), expected, 40)
    assert p.agrees(F.backward_feature_cosine(p.a, p.b), math.cos(expected) if known else math.nan, 40)
    assert p.agrees(F.backward_feature_angle(-p.a, p.b), math.pi - expected, 40)
    sums = angle_sums(p.a.double() / p.units[0], p.b.double() / p.units[1])
    assert bool(angle_from_sums(*sums).isnan()) if not known else abs(float(angle_from_sums(*sums)) - expected) < 1e-6


@given(pairs(), st.integers(0, 12))
def test_sums_of_angles_add_up(p, cut):
    whole = torch.stack(angle_sums(p.x, p.y))
    parts = torch.stack(angle_sums(p.x[:cut], p.y[:cut])) + torch.stack(angle_sums(p.x[cut:], p.y[cut:]))
    torch.testing.assert_close(parts, whole, rtol=1e-10, atol=1e-12)


@given(pairs(one_unit=True))
def test_sensitivity_is_what_a_unit_of_loss_moves(p):
    inner_product = -float((p.x * p.y).sum())
    size = float(p.x.norm() * p.y.norm())
    if abs(inner_product) > 1e-3 * size:
        expected = float(p.x.square().mean().sqrt()) / inner_product
        found = float(F.sensitivity(p.a, p.b)) * p.units[1]
        assert abs(found - expected) <= 1e5 * p.eps * abs(expected)
    if size == 0:
        assert bool(F.sensitivity(p.a, p.b).isnan())


@given(pairs())
def test_speeds_of_gradients_are_relative_to_them(p):
    found = F.backward_speed(p.a, p.a + p.a)
    assert bool(found.isnan()) if bool((p.x == 0).all()) else abs(float(found) - 1) <= 1e-5


# --- sums of products


@given(pairs(), st.booleans())
def test_contributions_are_exact_sums_of_products(p, transposed):
    """Whatever the layout of the two in memory."""
    b = p.y.to(p.dtype)
    g = p.x.to(p.dtype)
    found = F.contribution(g.mT, b.mT) if transposed else F.contribution(g, b)
    products = [float(x) * float(y) for x, y in zip(g.flatten(), b.flatten(), strict=True)]
    assert abs(float(found) + math.fsum(products)) <= 32 * p.eps * math.fsum(map(abs, products))


@given(st.lists(st.lists(st.tuples(st.integers(0, 60), st.booleans(), seeds), max_size=4), max_size=4))
def test_sums_of_many_pairs_are_those_of_each(sizes):
    """Short pairs are multiplied side by side; long ones are not."""
    several = []
    for row in sizes:
        made = []
        for size, long, seed in row:
            generator = torch.Generator().manual_seed(seed)
            shape = (size * (100 if long else 1), 3)
            made.append(tuple(torch.randn(shape, generator=generator) for _ in range(2)))
        several.append(made)
    found = inner_sums(several, torch.float64)
    assert found.shape == (len(several),)
    for value, made in zip(found.tolist(), several, strict=True):
        assert abs(value - math.fsum(float(inner(a, b, torch.float64)) for a, b in made)) <= 1e-9


# --- moments of the backward-to-feature kernel


@given(st.integers(1, 4), st.integers(1, 4), st.floats(1e-3, 10), st.floats(0, 10), seeds)
def test_moments_are_those_of_the_kernel_written_out(m, n, first, second, seed):
    generator = torch.Generator().manual_seed(seed)
    V, W, x = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((m, n), (n, n), (n,)))
    V, W = V.requires_grad_(), W.requires_grad_()

    def out(V, W):
        return V @ torch.tanh(W @ x)

    J = [j.flatten(1) for j in torch.autograd.functional.jacobian(out, (V, W))]
    K = first * J[0] @ J[0].T + second * J[1] @ J[1].T
    basis = [[math.sqrt(m) * e] for e in torch.eye(m, dtype=torch.float64)]
    m1, m2 = F.bfk_moments([out(V, W)], [V, W], [first, second], basis)
    torch.testing.assert_close(m1, K.trace() / m, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(m2, (K @ K).trace() / m, rtol=1e-9, atol=1e-12)
    assert 0 <= float(F.bfk_ratio(m1, m2)) <= 1 + 1e-9
