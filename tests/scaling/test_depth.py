"""Slopes against depth: what is predicted, held against networks that are trained."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import nn

from spectral_monitor.measurement import LayerInfo
from spectral_monitor.parametrization.layer_position import LayerPosition
from spectral_monitor.scaling import COMPLETE_P, DEPTH_MUP, FSC, FSC_RESNET, MF_MUP, MUP, NTK, predict, sweep
from tests.scaling.sweeping import Chain, Residual, one_sample

KEYS = (
    "weight_natural",
    "update_natural",
    "update_fro",
    "update_ratio",
    "drift_ratio",
    "feature_rms",
    "feature_change",
    "feature_change_local",
    "contribution",
    "bfa_cos",
    "sensitivity",
    "alignment",
    "update_alignment",
)
MEASURED = [
    (FSC, "sgd", 0.01),
    (FSC_RESNET, "sgd", 0.01),
    (FSC_RESNET, "adam", 0.01),
    (DEPTH_MUP, "sgd", 0.02),
    (DEPTH_MUP, "adam", 0.01),
    (COMPLETE_P, "sgd", 0.02),
    (COMPLETE_P, "adam", 0.01),
    *(
        pytest.param(*one, marks=pytest.mark.exhaustive)
        for one in ((FSC, "adam", 0.003), (MF_MUP, "sgd", 0.01), (NTK, "sgd", 0.1))
    ),
]


def swept(p, optimizer, lr, **options):
    """Chains are wide, because their signal varies with depth over width; residual nets are deep instead."""
    if p.branch is None:
        make, sizes = Chain, {"widths": 1024, "depths": (4, 8, 16, 32)}
    else:
        make, sizes = functools.partial(Residual, parametrization=p), {"widths": 256, "depths": (8, 16, 32, 64)}
    given = {"seeds": 4, "steps": 2, "quantities": KEYS, **sizes, **options}
    return sweep(make, one_sample, parametrization=p, optimizer=optimizer, lr=lr, progress=False, **given)


@pytest.mark.slow
@pytest.mark.parametrize(("p", "optimizer", "lr"), MEASURED, ids=lambda x: getattr(x, "name", str(x)))
def test_measured_slopes(p, optimizer, lr):
    """Within 0.1 of the prediction, beside three standard errors of at most 0.2 together."""
    result = swept(p, optimizer, lr)
    compared = 0
    for step in (1, 2):
        for slope in result.at(step).slopes:
            if math.isnan(slope.predicted):
                continue
            half = (slope.fit.high - slope.fit.low) / 2 / 3.182  # Student's t of three degrees of freedom, 95 %
            error = 0.1 + min(3 * half, 0.2)
            assert slope.fit.slope == pytest.approx(slope.predicted, abs=error), (step, slope.layer, slope.quantity)
            compared += 1
    assert compared > 100
    assert not result.off


# What the papers say of large depths: no width, no network.

DEPTHS = (10**4, 10**5, 10**6)


def told(p, optimizer, quantity, **options):
    """Slopes against very large depths, of an input layer, the first and the last hidden matrix, and a readout."""
    m, k = 100, 3
    infos, places = [], []
    for depth in DEPTHS:
        rows = {
            "read": ("operator", m, 9, "input", 0),
            "first": ("operator", m, m, "hidden", 1),
            "last": ("operator", m, m, "hidden", depth),
            "out": ("readout", k, m, "readout", depth + 1),
        }
        infos.append([LayerInfo(name, role, a, b, (a, b)) for name, (role, a, b, _, _) in rows.items()])
        places.append(
            {
                name: LayerPosition(kind, b, a, index, depth + 2, depth, kind == "hidden")
                for name, (_, a, b, kind, index) in rows.items()
            }
        )
    return predict(p, optimizer, quantity, DEPTHS, infos, places, axis="depth", **options)


PAPERS = [
    # of the input layer, the first and the last hidden matrix, and the readout; None: nothing is predicted
    (FSC, "contribution", (-1, -1, -1, -1)),
    (FSC, "feature_change", (-1.5, -1.5, 0, None)),
    (FSC, "sensitivity", (-0.5, -0.5, 0, None)),
    (FSC, "bfa_cos", (0, 0, -0.5, None)),
    (MF_MUP, "contribution", (-1.5, -1.5, -1.5, -1.5)),
    (MF_MUP, "feature_change", (-1.5, -1.5, 0, None)),
    (MF_MUP, "sensitivity", (0, 0, 0.5, None)),
    (NTK, "contribution", (-1, -1, -1, -1)),
    (NTK, "feature_change", (-1, -1, 0.5, None)),
    (NTK, "sensitivity", (0, 0, 0.5, None)),
    (FSC_RESNET, "contribution", (-1, -1, -1, -1)),
    (FSC_RESNET, "feature_change", (-1, -0.5, 0, None)),
    (FSC_RESNET, "sensitivity", (0, 0.5, None, None)),
    (FSC_RESNET, "bfa_cos", (0, 0, None, None)),
    (DEPTH_MUP, "contribution", (0, -1, -1, 0)),
    (DEPTH_MUP, "update_natural", (0, -0.5, -0.5, 0)),
    (DEPTH_MUP, "feature_change", (0, 0, 0, None)),
    (COMPLETE_P, "contribution", (0, -1, -1, 0)),
    (COMPLETE_P, "update_natural", (0, 0, 0, 0)),
    (COMPLETE_P, "feature_change", (0, 0, 0, None)),
    (COMPLETE_P, "bfa_cos", (0, 0, 0, None)),
    (COMPLETE_P, "sensitivity", (0, 1, 1, None)),
]


@pytest.mark.parametrize(("p", "quantity", "expected"), PAPERS, ids=lambda x: getattr(x, "name", str(x)))
def test_exponents_of_the_papers(p, quantity, expected):
    found = list(told(p, "sgd", quantity).values())
    assert found == pytest.approx([math.nan if e is None else e for e in expected], abs=0.01, nan_ok=True)


@pytest.mark.parametrize("p", [FSC, MF_MUP, NTK, FSC_RESNET, DEPTH_MUP, COMPLETE_P], ids=lambda p: p.name)
def test_adam_moves_features_as_sgd_does(p):
    for quantity in ("update_natural", "feature_change", "bfa_cos", "sensitivity"):
        assert told(p, "adam", quantity) == pytest.approx(told(p, "sgd", quantity), abs=1e-9, nan_ok=True)


def test_outputs_are_predicted_of_the_start_alone():
    assert told(FSC, "sgd", "feature_rms", start=True)["out"] == pytest.approx(0.5, abs=0.01)
    assert told(MF_MUP, "sgd", "feature_rms", start=True)["out"] == pytest.approx(0, abs=0.01)
    assert math.isnan(told(FSC, "sgd", "feature_rms")["out"])


def test_nothing_is_predicted_of_a_signal_that_dies():
    """Of muP the hidden matrices halve what a ReLU lets through: no power of the depth."""
    for quantity in ("feature_rms", "feature_change", "bfa_cos", "sensitivity", "contribution", "update_natural"):
        assert all(map(math.isnan, told(MUP, "sgd", quantity).values())), quantity
    for quantity in ("weight_natural", "update_natural", "update_ratio"):
        assert all(math.isfinite(slope) for slope in told(MUP, "adam", quantity).values()), quantity


def test_depths_need_places():
    infos = [[LayerInfo("0", "operator", 9, 9, (9, 9))]] * 2
    with pytest.raises(ValueError, match="depths need places=: layers alone do not tell how deep they are"):
        predict(FSC, "sgd", "bfa_cos", (4, 8), infos, axis="depth")


def test_a_sweep_over_depths_has_predictions():
    result = swept(FSC, "sgd", 0.01, widths=8, depths=(4, 8, 16), seeds=1)
    predicted = {(s.layer, s.quantity): s.predicted for s in result.slopes}
    assert predicted["out", "weight_natural"] == pytest.approx(slope_of((6, 10, 18), 0.5))
    assert predicted["body.* (last)", "bfa_cos"] == pytest.approx(slope_of((6, 10, 18), -0.5))
    assert predicted["body.* (middle)", "bfa_cos"] == pytest.approx(slope_of((5, 7, 11), -0.5))
    assert predicted["body.* (first)", "bfa_cos"] == 0
    assert math.isnan(predicted["out", "feature_rms"])
    start = {(s.layer, s.quantity): s.predicted for s in result.at(1).slopes}
    assert start["out", "feature_rms"] == pytest.approx(slope_of((6, 10, 18), 0.5))
    assert "predictions against depth are for one sample" in str(result)


def slope_of(numbers, power):
    """Least squares over depths 4, 8 and 16: the ends alone count, as logarithms are evenly spaced."""
    return power * math.log(numbers[-1] / numbers[0]) / math.log(4)


def test_a_sweep_of_blocks_has_predictions():
    """Layers of a block are followed each by itself; embeddings and norms are not on branches."""

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    class Net(nn.Module):
        def __init__(self, width, depth):
            super().__init__()
            self.multiplier = DEPTH_MUP.branch_multiplier(depth)
            self.tokens, self.blocks = nn.Embedding(5, width), nn.ModuleList(Block(width) for _ in range(depth))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 5)

        def forward(self, x):
            f = self.tokens(x)
            for block in self.blocks:
                f = f + self.multiplier * block.down(block.up(block.norm(f)).relu())
            return nn.functional.cross_entropy(self.head(self.norm(f)), x)

    result = sweep(
        Net,
        (torch.arange(5),),
        widths=8,
        depths=(2, 4, 8),
        seeds=1,
        steps=1,
        quantities=["update_natural"],
        parametrization=DEPTH_MUP,
        optimizer="adam",
        lr=0.01,
        progress=False,
    )
    found = {slope.layer: slope.predicted for slope in result.slopes}
    places = ("first", "middle", "last")
    blocks = {f"blocks.*.{name} ({place})": -0.5 for name in ("up", "down") for place in places}
    assert found == pytest.approx({"tokens": 0, **blocks, "head": 0})
