"""Linearity and the alignment of kernels, against loops over pairs of rows in numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import spectral_monitor.functional as F


def gaussian(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(("dtype", "rel"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-5)])
def test_linearity_by_hand(dtype, rel):
    start, now, tangent = (gaussian(7, 5, seed=k, dtype=dtype) for k in range(3))
    a, b, c = (x.double().numpy() for x in (start, now, tangent))
    expected = math.sqrt(((b - a - c) ** 2).sum() / ((b - a) ** 2).sum())
    assert F.linearity(start, now, tangent).item() == pytest.approx(expected, rel=rel)
    assert F.linearity(start, start + tangent, tangent).item() < 4e-2  # what rounding of bfloat16 leaves


def test_linearity_of_a_square_is_half_of_the_relative_change():
    """``w^2`` from w to w (1 + e): the change is 2 e + e^2, its linearization 2 e."""
    for e in (0.01, 1.0):
        w = torch.tensor([3.0], dtype=torch.float64)
        found = F.linearity(w**2, (w * (1 + e)) ** 2, 2 * w * w * e)
        assert found.item() == pytest.approx(e / (2 + e), rel=1e-12)


@pytest.mark.parametrize("width", [3, 12])
def test_alignment_by_hand(width):
    start, now = gaussian(6, width), gaussian(6, 5, seed=1)
    kernels = []
    for h in (start.numpy(), now.numpy()):
        rows = h - h.mean(0)
        kernels.append(np.array([[sum(x * y) for y in rows] for x in rows]))
    expected = (kernels[0] * kernels[1]).sum() / (np.linalg.norm(kernels[0]) * np.linalg.norm(kernels[1]))
    assert F.kernel_alignment(start, now).item() == pytest.approx(expected, rel=1e-12)


def test_alignment_sees_no_rotation_no_scale_and_no_mean():
    h = gaussian(9, 5)
    rotation = torch.linalg.qr(gaussian(5, 5, seed=1)).Q
    assert F.kernel_alignment(h, 3 * h @ rotation + 7).item() == pytest.approx(1, abs=1e-12)
    assert F.kernel_alignment(h, gaussian(9, 5, seed=2)).item() < 0.7


def test_what_divides_by_nothing_is_no_number():
    h = gaussian(4, 3)
    assert F.linearity(h, h, h).isnan()
    for rows in range(1, 40):
        alike, other = gaussian(1, 3, seed=rows).float().expand(rows, 3), gaussian(rows, 3).float()
        assert F.kernel_alignment(alike, other).isnan()
        assert F.kernel_alignment(other, alike).isnan()


def test_shapes_are_checked():
    with pytest.raises(ValueError, match=r"h_start \(4, 3\), h_now \(4, 2\)"):
        F.linearity(gaussian(4, 3), gaussian(4, 2), gaussian(4, 3))
    with pytest.raises(ValueError, match="h_start has 4 rows, h_now 5"):
        F.kernel_alignment(gaussian(4, 3), gaussian(5, 3))
    with pytest.raises(ValueError, match="h_now"):
        F.kernel_alignment(gaussian(4, 3), gaussian(4))


def test_rounding_does_not_take_alignment_out_of_its_range():
    for seed in range(200):
        a, b = (gaussian(2, 1, seed=2 * seed + k, dtype=torch.float32) for k in range(2))
        c = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0, 0.0]])  # orthogonal contrasts
        d = torch.tensor([[1.0], [1.0], [-1.0], [-1.0]]) * gaussian(1, 1, seed=seed, dtype=torch.float32)
        for first, second in ((a, b), (c, d), (c @ gaussian(3, 3, seed=seed).float(), d)):
            assert 0 <= F.kernel_alignment(first, second).item() <= 1


@pytest.mark.parametrize(("dtype", "rel"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_parts_of_the_output_by_hand(dtype, rel):
    V0, V, x0, x = (gaussian(*shape, seed=k, dtype=dtype) for k, shape in enumerate(((3, 4), (3, 4), (6, 4), (6, 4))))
    a, b, c, d = (z.double().numpy() for z in (V0, V, x0, x))
    df = d @ b.T - c @ a.T + 0.3
    parts = [(d - c) @ a.T, c @ (b - a).T, (d - c) @ (b - a).T]
    np.testing.assert_allclose(sum(parts) + 0.3, df, rtol=1e-10)
    found = F.output_parts(V0, V, x0, x, torch.as_tensor(df).to(dtype))
    assert [part.item() for part in found] == pytest.approx(
        [np.linalg.norm(p) / np.linalg.norm(df) for p in parts], rel
    )
    assert all(part.isnan() for part in F.output_parts(V0, V0, x0, x0, torch.zeros(6, 3)))
    with pytest.raises(ValueError, match=r"change \(6, 4\) do not fit"):
        F.output_parts(V0, V, x0, x, x)
    with pytest.raises(ValueError, match=r"W_now \(2, 4\)"):
        F.output_parts(V0, V[:2], x0, x, torch.zeros(6, 3))
    with pytest.raises(ValueError, match=r"x_now \(5, 4\)"):
        F.output_parts(V0, V, x0, x[:5], torch.zeros(6, 3))
