"""Predicted slopes against slopes measured on perceptrons that are trained."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from spectral_monitor import SpectralProbe
from spectral_monitor.measurement import LayerInfo
from spectral_monitor.quantities import QUANTITIES
from spectral_monitor.scaling import MFP, MUP, NTP, SP, SPECTRAL, predict
from tests.one_step import training_step

SEEDS = 4
WIDTHS = (128, 256, 512, 1024, 2048)
KEYS = [
    "weight_norm",
    "weight_natural",
    "weight_fro",
    "weight_stable_rank",
    "update_norm",
    "update_natural",
    "update_fro",
    "update_ratio",
    "update_stable_rank",
    "drift_ratio",
    "drift_fro_ratio",
    "feature_rms",
    "feature_change",
    "feature_change_local",
    "contribution",
    "update_alignment",
    "alignment",
    "sensitivity",
]


def measured(p, optimizer, width, seed, hidden, lr):
    """All quantities at the first two steps of a tanh network on 16 examples, and its layers."""
    torch.manual_seed(seed)
    sizes = [24, *(width,) * hidden, 3]
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    net = nn.Sequential(*[part for layer in layers for part in (layer, nn.Tanh())][:-1])
    p.init_(net)
    kind = torch.optim.SGD if optimizer == "sgd" else torch.optim.Adam
    probe = SpectralProbe(net, opt := kind(p.param_groups(net, lr, optimizer)), every_n_steps=1, quantities=KEYS)
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(16, 24, generator=generator), torch.randn(16, 3, generator=generator)
    for _ in range(2):
        with training_step(probe, opt):
            mse_loss(net(x), y).backward()
    return probe.measurements


CASES = [
    (MUP, "sgd", 2, 0.05),
    (MUP, "adam", 2, 0.02),
    (SPECTRAL, "adam", 2, 0.02),
    (MFP, "sgd", 1, 0.05),
    (NTP, "sgd", 2, 0.05),
    (NTP, "adam", 2, 0.02),
    (SP, "adam", 2, 1e-4),
]


@pytest.mark.slow
@pytest.mark.parametrize(("p", "optimizer", "hidden", "lr"), CASES, ids=lambda x: getattr(x, "name", str(x)))
def test_measured_slopes(p, optimizer, hidden, lr):
    by_width = [[measured(p, optimizer, width, seed, hidden, lr) for seed in range(SEEDS)] for width in WIDTHS]
    infos = [some[0][0].layers for some in by_width]
    compared = 0
    for step, key in itertools.product(range(2), KEYS):
        found = predict(p, optimizer, key, WIDTHS, infos, start=step == 0)
        for i, (name, slope) in enumerate(found.items()):
            if math.isnan(slope):
                continue
            logs = [[math.log(abs(steps[step].values[key][i].item())) for steps in some] for some in by_width]
            fitted = np.polyfit(np.log(WIDTHS), logs, 1)[0]  # one for each seed
            error = 3 * fitted.std(ddof=1) / math.sqrt(SEEDS)
            assert fitted.mean() == pytest.approx(slope, abs=0.1 + min(error, 0.2)), (step, key, name)
            compared += 1
    assert compared > 60


def test_what_the_papers_say_of_readouts_and_sensitivity():
    """Fig. 2C of the first paper at its start, Cor. 3.10 of the third, and NTK and muP of the second."""
    widths = (10**6, 10**7, 10**8)
    layers = [
        [
            LayerInfo("0", "operator", w, 24, (w, 24)),
            LayerInfo("2", "operator", w, w, (w, w)),
            LayerInfo("4", "readout", 3, w, (3, w)),
        ]
        for w in widths
    ]
    for p, outputs, sensitivity in ((MUP, -0.5, 0.0), (NTP, 0.0, -0.5), (SP, 0.0, -0.5)):
        of = {key: predict(p, "sgd", key, widths, layers, start=True) for key in ("alignment", "feature_rms")}
        assert of["alignment"] == pytest.approx({"0": 0, "2": 0, "4": -0.5}, abs=0.01)
        assert of["feature_rms"] == pytest.approx({"0": 0, "2": 0, "4": outputs}, abs=0.01)
        later = {key: predict(p, "sgd", key, widths, layers) for key in ("alignment", "feature_rms", "sensitivity")}
        assert math.isnan(later["alignment"]["4"])
        assert math.isnan(later["feature_rms"]["4"])
        if p is SP:  # which blows up: its readout's first update is larger than its weights, as gradients then are
            of = {start: predict(p, "sgd", "update_natural", widths, layers, start=start) for start in (True, False)}
            assert (of[True]["2"], of[False]["2"]) == pytest.approx((0.5, 1.0))
        else:
            assert later["sensitivity"]["2"] == pytest.approx(sensitivity, abs=0.01)
            assert math.isnan(later["sensitivity"]["4"])


def test_nothing_is_predicted_of_features_that_blow_up():
    layers = [[LayerInfo("0", "operator", w, 24, (w, 24)), LayerInfo("2", "operator", w, w, (w, w))] for w in (64, 128)]
    for key in ("feature_change", "contribution", "sensitivity", "alignment"):
        assert all(map(math.isnan, predict(SP, "adam", key, (64, 128), layers).values()))
        assert not any(map(math.isnan, predict(MUP, "adam", key, (64, 128), layers).values()))
    assert predict(SP, "adam", "update_natural", (64, 128), layers) == pytest.approx({"0": 0, "2": 1})


def test_nothing_is_predicted_where_theory_is_silent():
    layers = [[LayerInfo("0", "operator", w, 24, (w, 24)), LayerInfo("2", "readout", 3, w, (3, w))] for w in (64, 128)]
    silent = {key for key in QUANTITIES if all(map(math.isnan, predict(MUP, "sgd", key, (64, 128), layers).values()))}
    assert silent >= {"bfa", "bfa_cos", "input_stable_rank", "lr"}
    assert not silent & set(KEYS)


def test_a_layer_that_is_not_at_every_width_is_left_out():
    one = LayerInfo("0", "operator", 64, 24, (64, 24))
    other = LayerInfo("1", "readout", 3, 64, (3, 64))
    assert list(predict(SP, "sgd", "update_norm", (64, 128), [[one, other], [one]])) == ["0"]
