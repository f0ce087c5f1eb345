"""Channels of features and what 8 bits lose, by definition."""

from __future__ import annotations

import pytest
import torch

from spectral_monitor.functional import features
from spectral_monitor.functional.features import channel_sizes, feature_kurtosis, outlier_ratio, underflow_share
from tests.functional.made import Made

E4M3, E5M2 = (torch.float8_e4m3fn, 448.0, 2.0**-9), (torch.float8_e5m2, 57344.0, 2.0**-16)
"""A format, its largest number, and its smallest above 0."""


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_sizes_of_channels_are_those_of_their_columns(dtype):
    h = torch.randn(7, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    squares, peaks = channel_sizes(h)
    for k, column in enumerate(h.double().T.tolist()):
        assert squares[k].item() == pytest.approx(sum(x * x for x in column), rel=1e-6)
        assert peaks[k].item() == max(map(abs, column))
    assert torch.equal(channel_sizes(h[:0]), torch.zeros(2, 4).to(squares))


def test_kurtosis_is_between_one_and_the_number_of_channels():
    assert feature_kurtosis(torch.full((6,), 1e-30)).item() == pytest.approx(1)
    assert feature_kurtosis(torch.tensor([0.0, 0.0, 1e30, 0.0])).item() == pytest.approx(4)
    squares = torch.tensor([1.0, 2.0, 4.0]).double()
    assert feature_kurtosis(squares).item() == pytest.approx((21 / 3) / (7 / 3) ** 2)
    assert feature_kurtosis(torch.zeros(3)).isnan()


def test_the_largest_peak_over_the_median_one():
    assert outlier_ratio(torch.tensor([4.0, 1.0, 2.0, 3.0, 18.0])).item() == 6
    assert outlier_ratio(torch.tensor([0.0, 0.0, 1.0])).isnan()


@pytest.mark.parametrize(("form", "most", "least"), [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e20])
def test_what_rounds_to_zero_is_lost(form, most, least, scale):
    """Half the smallest number and less is; the largest entry of all parts becomes the largest number."""
    unit = scale / most * least
    parts = [torch.tensor([[0.0, 0.3, 0.49], [0.51, 1.0, -0.2]]), torch.tensor([0.0, -0.4, -0.6])]
    parts = [part.double() * unit for part in parts]
    assert underflow_share([*parts, torch.tensor([[-scale]]).double()], form).item() == pytest.approx(4 / 8)
    assert underflow_share([part * 0 for part in parts], form).item() == 0
    assert underflow_share([parts[0][:0], parts[1] * 0 + 1], form).item() == 0


@pytest.mark.parametrize("chunk", [1, 12, 100, 1 << 22])
def test_a_few_entries_are_cast_at_a_time(monkeypatch, chunk):
    x = torch.randn(30, 6, generator=torch.Generator().manual_seed(0)).mul(9).exp()
    parts = [x, x[:7] / 3]
    expected = underflow_share(parts, torch.float8_e5m2)
    assert 0 < expected < 1
    monkeypatch.setattr(features, "CHUNK", chunk)
    with Made() as made:
        found = underflow_share(parts, torch.float8_e5m2)
    assert torch.equal(found, expected)
    rows = max(1, chunk // 6)
    # Each part is divided by the size of the whole, and at the end a count by a count.
    assert made.calls["div"] == -(-30 // rows) + -(-7 // rows) + 1
