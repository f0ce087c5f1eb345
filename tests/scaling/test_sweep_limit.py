"""The column of infinite width in sweeps: exact by the twin, extrapolated for any module."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from spectral_monitor.limits import twin
from spectral_monitor.scaling import MUP, SP, sweep
from spectral_monitor.scaling.batches import SweepError

WIDTHS = (64, 256, 1024)


class Pair(nn.Module):
    """A linear pair and its loss."""

    def __init__(self, width):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, width, bias=False), nn.Linear(width, 2, bias=False))

    def forward(self, x, y):
        return (self.net(x) - y).square().sum(1).mean() / 2


class Normalized(Pair):
    def __init__(self, width):
        super().__init__(width)
        self.net.insert(1, nn.LayerNorm(width))


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 4, generator=generator)
    return x, x[:, :2] - x[:, 2:]


def swept(make=Pair, parametrization=MUP, **settings):
    settings = {"seeds": 4, "steps": 4, "quantities": ["feature_change", "weight_natural"], "lr": 0.3, **settings}
    return sweep(make, data(), widths=WIDTHS, parametrization=parametrization, progress=False, **settings)


@pytest.fixture(scope="module")
def exact():
    return swept(limit="exact")


def test_the_exact_limit_is_that_of_the_twin(exact):
    """Natural norms of its weights after plain steps of autograd, converted by hand."""
    made, (x, y) = twin(Pair(8).net, MUP, 0.3), data()
    optimizer = torch.optim.SGD(made.param_groups)
    for _ in range(4):
        optimizer.zero_grad()
        ((made.module(x) - y).square().sum(1).mean() / 2).backward()
        optimizer.step()
    U, V = (layer.weight.detach() for layer in made.module)
    first, second = (exact.limits[f"net.{i}", "weight_natural"] for i in (0, 1))
    assert first.value == pytest.approx(torch.linalg.matrix_norm(U, 2).item() * math.sqrt(4), rel=0.02)
    assert second.value == pytest.approx(torch.linalg.matrix_norm(V, 2).item() / math.sqrt(2), rel=0.02)
    assert first.low == first.value == first.high


def test_networks_come_closer_as_the_root_of_the_width(exact):
    slopes = [limit.fit.slope for limit in exact.limits.values()]
    assert len(slopes) == 4
    assert sum(slopes) / 4 == pytest.approx(-0.5, abs=0.25)
    for limit in exact.limits.values():
        assert limit.distances[1024] < 0.06
        assert limit.distances[1024] < limit.distances[64]


def test_extrapolation_finds_what_is_exact(exact):
    found = swept(limit="extrapolated", seeds=8)
    for key, limit in found.limits.items():
        wanted = exact.limits[key].value
        assert limit.low - 0.01 * wanted < wanted < limit.high + 0.01 * wanted
        assert limit.value == pytest.approx(wanted, rel=0.06)


def test_the_table_says_how_near_the_widest_network_is(exact):
    text = exact.table()
    header = next(line for line in text.splitlines() if "infinite" in line)
    assert "distance slope" in header
    worst = max(exact.limits[f"net.{i}", "feature_change"].distances[1024] for i in (0, 1))
    layer = max((0, 1), key=lambda i: exact.limits[f"net.{i}", "feature_change"].distances[1024])
    assert f"at width 1024 feature_change of net.{layer} is within {math.ceil(100 * worst)} % of its limit" in text
    assert "infinite" not in swept(seeds=1).table()
    # At another step the limits are those of that step.
    early = exact.at(1)
    assert early.limits["net.0", "feature_change"].value != exact.limits["net.0", "feature_change"].value


def test_the_figure_has_a_dashed_line_at_each_limit(exact):
    figure = exact.figure()
    for axis, quantity in zip(figure.axes, exact.recipe.quantities, strict=False):
        heights = [
            line.get_ydata()[0]
            for line in axis.lines
            if line.get_linestyle() == "--" and len(set(line.get_ydata())) == 1
        ]
        for layer in ("net.0", "net.1"):
            assert any(h == pytest.approx(exact.limits[layer, quantity].value) for h in heights)
    assert "infinite width" in [text.get_text() for text in figure.legends[0].get_texts()]


def test_parametrizations_without_a_limit_have_none():
    exact = swept(parametrization=SP, limit="exact", seeds=1)
    assert "SP has no feature-learning limit" in exact.limits["net.0", "weight_natural"].reason
    assert "no limit of feature_change in 2 of 2 layers: SP has no feature-learning limit" in exact.table()
    lazy = swept(parametrization=SP, limit="extrapolated", seeds=3, lr=0.001, quantities=["update_natural"])
    assert any(limit.reason.startswith("it grows like") for limit in lazy.limits.values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"limit": "inf"}, "limit must be 'exact' or 'extrapolated', got 'inf'"),
        ({"limit": "exact", "optimizer": "adam"}, "Adam has no exact limit here"),
        ({"limit": "exact", "make": Normalized}, "Sequential of 3 modules has no exact limit here"),
    ],
)
def test_bad_input_is_named(settings, message):
    with pytest.raises(SweepError, match=message):
        swept(**{"seeds": 1, **settings})
