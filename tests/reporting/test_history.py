"""Which measurements a picture keeps, families of layers, and the list of questions."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from spectral_monitor import LayerInfo, Measurement
from spectral_monitor.quantities import QUANTITIES
from spectral_monitor.reporting.content.families import families_of
from spectral_monitor.reporting.content.history import History
from spectral_monitor.reporting.content.panels import PANELS, pictured, shown

LAYERS = tuple(LayerInfo(name, "operator", 8, 8, (8, 8)) for name in ("a", "b"))


def measurement(step, layers=LAYERS, **values):
    columns = {key: torch.tensor([float(value)] * len(layers)) for key, value in values.items()}
    return Measurement(step, layers, columns, {}, bands={"lr": torch.tensor([[1.0, 4.0, 2.0]] * len(layers))})


@pytest.mark.parametrize("columns", [2, 7, 8, 64])
@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 100, 1000])
def test_it_is_bounded_evenly_spaced_and_has_both_ends(columns, count):
    history = History(columns)
    for step in range(1, count + 1):
        history.add(measurement(step, lr=step))
    steps = history.steps
    assert len(steps) <= columns + 1
    assert (steps[0], steps[-1]) == (1, count)
    gaps = {b - a for a, b in pairwise(steps[:-1])}
    assert len(gaps) <= 1, "all but the last are the same distance apart"
    assert len(steps) >= min(count, columns) // 2
    assert history.values("lr").tolist() == [steps, steps]


def test_ratios_are_values_over_references():
    history = History()
    history.add(measurement(1, lr=4.0, bfa=1.0))
    history.add(measurement(2, bfa=2.0))
    ratios = history.ratios("lr")
    assert ratios[:, 0].tolist() == [2.0, 2.0]
    assert ratios[:, 1].isnan().all()
    assert history.ratios("bfa").isnan().all(), "held against nothing"
    assert history.values("never").isnan().all()


def test_other_layers_begin_anew():
    history = History()
    history.add(measurement(1, lr=1.0))
    history.add(measurement(2, LAYERS[:1], lr=3.0))
    assert history.steps == [2]
    assert history.values("lr").tolist() == [[3.0]]


def test_nothing_yet():
    history = History()
    assert (history.steps, history.values("lr").shape, len(history)) == ([], (0, 0), 0)
    assert history.ratios("lr").shape == (0, 0)


def test_every_layer_is_of_one_family():
    names = ["tok", "pos", *(f"blocks.{i}.{part}" for i in range(12) for part in ("qkv", "mlp.0", "mlp.2")), "head"]
    found = families_of(names)
    assert sorted(i for some in found.values() for i in some) == list(range(len(names)))
    assert {of: len(some) for of, some in found.items()} == {
        "blocks.*.qkv": 12,
        "blocks.*.mlp.0": 12,
        "blocks.*.mlp.2": 12,
        "others": 3,
    }


def test_a_family_of_one_layer_is_among_the_others():
    assert families_of(["layer1.0.conv", "layer1.1.conv", "layer2.0.down", "fc"]) == {
        "layer1.*.conv": [0, 1],
        "others": [2, 3],
    }


def test_panels_ask_for_what_there_is():
    assert len(PANELS) == 15
    asked = [key for panel in PANELS for key in panel.quantities]
    assert len(set(asked)) == len(asked)
    assert set(asked) | set(pictured()) <= set(QUANTITIES)
    assert all(panel.question.endswith("?") for panel in PANELS)


def test_biases_are_left_out():
    layers = (*LAYERS, LayerInfo("a.bias", "vector", 8, 1, (8,)))
    assert shown(PANELS[0], layers) == [0, 1]
