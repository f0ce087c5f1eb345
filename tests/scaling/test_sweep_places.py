"""Predictions follow from the rule that the parametrization used at a layer: tied, grouped and computed weights."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from spectral_monitor.measurement import LayerInfo
from spectral_monitor.parametrization.layer_position import LayerPosition
from spectral_monitor.scaling import MUP, SPECTRAL, predict
from spectral_monitor.scaling.sweeps.sweep import sweep

TOKENS = 20


class Tied(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(TOKENS, width), nn.Embedding(6, width)
        self.mlp, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.head = nn.Linear(width, TOKENS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x, y):
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        return cross_entropy(self.head(self.norm(h + self.mlp(h).relu())).flatten(0, 1), y.flatten())


class Depthwise(nn.Module):
    def __init__(self, width, groups=None):
        super().__init__()
        self.read = nn.Conv2d(3, width, 3)
        self.spatial = nn.Conv2d(width, width, 3, groups=groups or width)
        self.head = nn.Linear(width, 5)

    def forward(self, x, y):
        return cross_entropy(self.head(self.spatial(self.read(x).relu()).relu().mean((2, 3))), y)


class Computed(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.read, self.out = nn.Linear(4, width), nn.Linear(width, 3)
        self.hidden = nn.utils.parametrizations.weight_norm(nn.Linear(width, width))

    def forward(self, x, y):
        return cross_entropy(self.out(self.hidden(self.read(x).relu()).relu()), y)


def tokens(seed):
    return torch.randint(TOKENS, (4, 6)), torch.randint(TOKENS, (4, 6))


def images(seed):
    return torch.randn(4, 3, 8, 8), torch.randint(5, (4,))


def points(seed):
    return torch.randn(4, 4), torch.randint(3, (4,))


def found(make_module, data, optimizer="adam", parametrization=MUP, **kwargs):
    """(layer, quantity) -> slope."""
    kwargs = {
        "widths": (16, 32, 64),
        "seeds": 2,
        "steps": 1,
        "quantities": ["update_natural"],
        "progress": False,
        **kwargs,
    }
    result = sweep(make_module, data, parametrization=parametrization, optimizer=optimizer, lr=0.01, **kwargs)
    return {(slope.layer, slope.quantity): slope for slope in result.slopes}


@pytest.mark.parametrize("parametrization", [MUP, SPECTRAL])
def test_tied_embeddings_follow_the_readout(parametrization):
    """Adam moves each entry by the learning rate, so that slopes of updates are known to a digit."""
    slopes = found(Tied, tokens, parametrization=parametrization, quantities=["update_natural", "weight_natural"])
    for name in ("tokens", "positions"):
        update, weight = slopes[name, "update_natural"], slopes[name, "weight_natural"]
        assert update.fit.slope == pytest.approx(-1.0, abs=0.02)
        assert update.predicted == pytest.approx(update.fit.slope, abs=0.02)
        assert update.verdict == "as predicted"
        assert weight.predicted == pytest.approx(weight.fit.slope, abs=0.2)
    assert slopes["head", "update_natural"].predicted == pytest.approx(0.0)
    assert slopes["mlp", "update_natural"].predicted == pytest.approx(0.0)


def test_what_hangs_on_normalization_is_not_predicted():
    """Gradients go with one over the size of what a normalization reads, which falls with the width."""
    keys = ["update_natural", "feature_rms", "contribution", "weight_natural", "feature_change", "sensitivity"]
    slopes = found(Tied, tokens, optimizer="sgd", quantities=keys)
    for (layer, quantity), slope in slopes.items():
        known = quantity == "weight_natural"
        assert math.isnan(slope.predicted) != known, (layer, quantity)
    adam = found(Tied, tokens, quantities=keys)
    assert math.isnan(adam["mlp", "feature_rms"].predicted)
    assert math.isnan(adam["mlp", "sensitivity"].predicted)
    assert adam["mlp", "feature_change"].predicted == pytest.approx(0.0)


def test_groups_of_a_convolution_share_a_rate():
    """Of a layer with more blocks in wider networks nothing is predicted; what comes after it knows its rate."""
    keys = ["update_natural", "weight_natural", "lr"]
    slopes = found(Depthwise, images, optimizer="sgd", quantities=keys)
    assert slopes["spatial", "lr"].fit.slope == pytest.approx(1.0)
    assert math.isnan(slopes["spatial", "update_natural"].predicted)
    assert math.isnan(slopes["spatial", "weight_natural"].predicted)
    assert slopes["read", "update_natural"].predicted == pytest.approx(0.0)
    slopes = found(lambda width: Depthwise(width, 4), images, optimizer="sgd", quantities=keys)
    assert slopes["spatial", "update_natural"].predicted == pytest.approx(0.0)


def test_a_parametrization_has_no_rule_for_computed_weights():
    slopes = found(Computed, points, quantities=["update_natural", "lr"])
    assert math.isnan(slopes["hidden", "update_natural"].predicted)
    assert slopes["out", "update_natural"].predicted == pytest.approx(0.0)


def test_places_are_kept(tmp_path):
    path = tmp_path / "sweep.jsonl"
    fresh = found(Tied, tokens, path=path)
    read = found(Tied, tokens, path=path)
    assert [slope.predicted for slope in read.values()] == [slope.predicted for slope in fresh.values()]
    row = json.loads(path.read_text().splitlines()[0])
    of_tied = {"kind": "readout", "fan_in": 16, "fan_out": TOKENS, "index": 1, "depth": 2}
    assert row["places"]["tokens"] == of_tied | {"branches": 1, "on_branch": False}


def test_a_place_is_taken_before_what_a_layer_tells():
    infos = [[LayerInfo("0", "embedding", w, 1, (9, w)), LayerInfo("1", "readout", 9, w, (9, w))] for w in (64, 128)]
    places = [{"0": LayerPosition("readout", w, 9, 0, 1), "1": LayerPosition("readout", w, 9, 0, 1)} for w in (64, 128)]
    assert predict(MUP, "adam", "weight_natural", (64, 128), infos)["0"] == pytest.approx(0.0)
    assert predict(MUP, "adam", "weight_natural", (64, 128), infos, places)["0"] == pytest.approx(-1.0)
    del places[1]["0"]
    assert math.isnan(predict(MUP, "adam", "weight_natural", (64, 128), infos, places)["0"])
