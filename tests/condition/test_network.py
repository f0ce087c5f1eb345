"""A measurement as the judge reads it: sizes that are alike in healthy layers, whatever their shapes."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest
import torch

from spectral_monitor import LayerInfo
from spectral_monitor.condition import SpectralCondition
from spectral_monitor.condition.findings import findings
from spectral_monitor.condition.network import Network
from spectral_monitor.condition.optimizers.hyperparameters import Hyperparameters
from spectral_monitor.condition.row import Row, columns
from spectral_monitor.measurement import LOST, Measurement
from tests.condition.synthetic import LAYERS, ZERO, measured, nothing, set_by

FANS = {"a": (64, 256), "b": (256, 64), "c": (1024, 1024), "d": (32, 16), "e": (10, 512)}


def natural(matrix):
    """The natural norm of a matrix (fan_out, fan_in); LAPACK takes seconds for singular values of rank one."""
    wide = matrix.double() if matrix.shape[0] <= matrix.shape[1] else matrix.double().T
    return float(torch.linalg.eigvalsh(wide @ wide.T)[-1].sqrt()) * math.sqrt(matrix.shape[1] / matrix.shape[0])


def network_of(matrices, optimizer, *, quantity="update", lr=None, shapes=None, expected=None):
    """A network whose updates, or weights, are these matrices, exactly measured; taps are summed as the engine does."""
    shapes = shapes or {}
    infos = tuple(
        LayerInfo(name, "operator", *m.shape[-2:], shapes.get(name, tuple(m.shape))) for name, m in matrices.items()
    )
    norms = [sum(natural(tap) for tap in m.reshape(-1, *m.shape[-2:])) for m in matrices.values()]
    sizes = [float(m.norm()) for m in matrices.values()]
    rates = lr or {}
    values = {
        f"{quantity}_natural": torch.tensor(norms),
        f"{quantity}_fro": torch.tensor(sizes),
        "lr": torch.tensor([rates.get(name, 0.01) for name in matrices]),
    }
    measurement = Measurement(1, infos, values, {})
    layers = {info.name: info for info in infos}
    settings = set_by(optimizer, layers=layers, lr=lr)
    return Network.read(measurement, columns(measurement), settings, expected=expected)


def updates(optimizer, **factors):
    """Healthy updates of rank one; ``factors``: of single layers.

    Adam's entries all have the size of the learning rate. The others are as large a part, 0.01, of weights that were
    drawn with entries of 1/sqrt(fan_in).
    """
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, (m, n) in FANS.items():
        gradient = torch.outer(*(torch.randn(k, generator=generator) for k in (m, n)))
        step = gradient.sign() if optimizer == "AdamW" else gradient / gradient.norm() * math.sqrt(m)
        found[name] = 0.01 * factors.get(name, 1.0) * step
    return found


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_updates_of_one_optimizer_at_one_rate_have_the_same_relative_size(optimizer):
    """With 16 to 1024 inputs the natural norms differ by 8 under SGD, and by 64 under Adam."""
    network = network_of(updates(optimizer), optimizer)
    norms = [row.get("update_natural") for row in network.rows]
    assert max(norms) / min(norms) == pytest.approx(64 if optimizer == "AdamW" else 8, rel=1e-3)
    sizes = [network.comparison.relative_size(row) for row in network.rows]
    assert sizes == pytest.approx([1.0] * 5, rel=1e-3)


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_the_odd_one_is_as_far_off_as_it_was_made(optimizer):
    network = network_of(updates(optimizer, b=30.0), optimizer)
    assert [network.comparison.relative_size(row) for row in network.rows] == pytest.approx([1, 30, 1, 1, 1], rel=1e-3)


def test_a_learning_rate_that_stands_out_is_not_taken_out():
    network = network_of(updates("AdamW", b=30.0), "AdamW", lr={"b": 0.3})
    assert network.comparison.relative_size(network.row("b")) == pytest.approx(30, rel=1e-3)


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_learning_rates_that_follow_a_rule_are(optimizer):
    lr = {name: 0.01 * 16 / n for name, (_, n) in FANS.items()}
    given = updates(optimizer, **{name: rate / 0.01 for name, rate in lr.items()})
    network = network_of(given, optimizer, lr=lr)
    assert [network.comparison.relative_size(row) for row in network.rows] == pytest.approx([1] * 5, rel=1e-3)


def test_learning_rates_that_follow_a_declaration_are():
    given = updates("AdamW", b=30.0)
    network = network_of(given, "AdamW", lr={"b": 0.3}, expected={"b": 30.0})
    assert network.comparison.relative_size(network.row("b")) == pytest.approx(1, rel=1e-3)


def test_layers_are_compared_with_those_of_their_optimizer_only():
    measurement = measured(1, update_natural={"a": 5.0, "head": 5.0})
    settings = set_by("Muon") | {name: of for name, of in set_by("AdamW", owner=1).items() if name in ("a", "head")}
    network = Network.read(measurement, columns(measurement), settings)
    assert {row.info.name for row in network.peers_of(network.row("a"))} == {"a", "head"}
    assert network.comparison.relative_size(network.row("a")) == pytest.approx(1)
    alone = set_by("Muon") | {"a": set_by("AdamW", owner=1)["a"]}
    network = Network.read(measurement, columns(measurement), alone)
    assert math.isnan(network.comparison.relative_size(network.row("a")))


@pytest.mark.parametrize("owner", [0, 1])
def test_the_rate_of_biases_is_that_of_those_with_the_same_optimizer(owner):
    """A first layer that has it has it on purpose, whatever another optimizer does to other biases."""
    lr = dict.fromkeys(LAYERS, 0.001) | {"a": 0.008, "a.bias": 0.008, "b.bias": 1.0, "c.bias": 1.0}
    other = set_by("AdamW", lr=lr, owner=1 - owner)
    settings = set_by("AdamW", lr=lr, owner=owner) | {name: other[name] for name in ("b.bias", "c.bias")}
    measurement = measured(1, lr=lr)
    network = Network.read(measurement, columns(measurement), settings)
    assert network.rates["a"].factor == pytest.approx(1)


def test_under_a_correction_layers_are_compared_by_what_it_makes_equal():
    """Natural norms, whatever the learning rates that it takes."""
    changed = {"update_natural": {"b": 0.3}, "lr": {"b": 1.0}, "lr_multiplier": dict.fromkeys(LAYERS, 2.0)}
    measurement = measured(1, **changed, update_fro={name: float(k) for k, name in enumerate(LAYERS, 1)})
    network = Network.read(measurement, columns(measurement), set_by("AdamW"))
    assert network.corrected
    assert [network.comparison.relative_size(row) for row in network.peers] == pytest.approx([1, 3, 1, 1])


def convolution(taps, generator, m=32, n=32):
    return torch.randn(taps, m, n, generator=generator) / math.sqrt(n * taps)


def test_taps_with_random_signs_add_up_by_their_root():
    """A 3 x 3 convolution and a matrix, drawn for the same gain: each tap is a third, and nine of them add up to 3."""
    generator = torch.Generator().manual_seed(0)
    weights = {"conv": convolution(9, generator), "matrix": convolution(1, generator)[0]}
    shapes = {"conv": (32, 32, 3, 3)}
    conv, matrix = network_of(weights, "AdamW", quantity="weight", shapes=shapes).rows
    assert (conv.taps, matrix.taps) == (9, 1)
    assert conv.get("weight_natural") == pytest.approx(3 * matrix.get("weight_natural"), rel=0.1)
    assert conv.weight == pytest.approx(matrix.weight, rel=0.1)
    assert conv.gain == pytest.approx(matrix.gain, rel=0.05) == pytest.approx(1, rel=0.05)


def test_a_convolution_whose_inputs_do_not_overlap_has_no_taps():
    """Its inputs are those of all positions: it is one matrix."""
    patches = Row(LayerInfo("p", "operator", 64, 3 * 16 * 16, (64, 3, 16, 16)), {"weight_natural": 1.7})
    assert (patches.taps, patches.weight) == (1, 1.7)
    overlapping = Row(LayerInfo("p", "operator", 64, 3, (64, 3, 4, 4)), {"weight_natural": 1.6})
    assert (overlapping.taps, overlapping.weight) == (16, pytest.approx(0.4))
    grouped = Row(LayerInfo("p", "operator", 8, 8, (64, 8, 3, 3), blocks=8), {})
    assert grouped.taps == 9
    assert Row(LayerInfo("p", "operator", 8, 8, (8, 8, 5)), {}).taps == 5, "in one dimension"


def test_gain_is_the_size_of_outputs_for_inputs_of_size_one():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 256, generator=generator) * 0.3
    x = torch.randn(4096, 256, generator=generator)
    row = network_of({"w": weight}, "SGD", quantity="weight").rows[0]
    assert row.gain == pytest.approx(float((x @ weight.T).square().mean().sqrt()), rel=0.02)
    assert Row(row.info, {"weight_natural": 2.0}).gain == 2.0, "the natural norm, where the other was not measured"


def test_gaussian_weights_are_fresh_and_low_rank_ones_are_not():
    generator = torch.Generator().manual_seed(0)

    def drawn(rank):
        full = {name: torch.randn(m, n, generator=generator) for name, (m, n) in FANS.items()}
        if not rank:
            return full
        return {name: w[:, :rank] @ w[:rank] if w.shape[0] >= rank else w for name, w in full.items()}

    assert network_of(drawn(None), "AdamW", quantity="weight").looks_fresh
    assert not network_of(drawn(2), "AdamW", quantity="weight").looks_fresh
    some = drawn(2) | {name: w for name, w in drawn(None).items() if name in "abc"}
    assert network_of(some, "AdamW", quantity="weight").looks_fresh, "the median counts"
    blank = measured(1, only=["lr"])
    assert Network.read(blank, columns(blank)).looks_fresh, "nothing speaks against it"


def test_randomness_is_the_stable_rank_over_that_of_a_gaussian_matrix():
    """Of a small convolution, whose taps are summed, too."""
    generator = torch.Generator().manual_seed(0)
    weights = {"conv": 0.01 * convolution(9, generator, 16, 8), "matrix": torch.randn(4, 6, generator=generator)}
    rows = network_of(weights, "AdamW", quantity="weight", shapes={"conv": (16, 8, 3, 3)}).rows
    for row, weight, taps in zip(rows, weights.values(), (9, 1), strict=True):
        norm = sum(float(torch.linalg.matrix_norm(tap, 2)) for tap in weight.reshape(-1, *weight.shape[-2:])) / taps
        m, n = weight.shape[-2:]
        usual = m * n / (m**0.5 + n**0.5) ** 2
        assert row.randomness == pytest.approx(float(weight.square().sum()) / taps / norm**2 / usual, rel=1e-5)


def test_the_way_of_the_median_layer_does_not_count_what_began_at_zero():
    measurement = measured(1, drift_ratio={"a": 0.1, "b": 0.2, "c": 0.3, "head": 50.0})
    network = Network.read(measurement, columns(measurement), set_by("AdamW"))
    assert network.drift == pytest.approx(math.sqrt(0.2 * 0.3))
    assert replace(network, from_zero=frozenset({"head"})).drift == pytest.approx(0.2)


def test_the_gain_of_others_does_not_count_what_began_at_zero():
    sizes = {"a": 8.0, "b": 32.0, "c": 8.0, "head": 0.001}
    measurement = measured(1, weight_fro=sizes)
    network = Network.read(measurement, columns(measurement))
    gain = network.comparison.others("weight_natural", network.row("b"))
    assert gain == pytest.approx(1.0)  # of 1, 1 and next to nothing
    zero = Network(1, network.rows, compared=network.compared, from_zero=frozenset({"head", "a"}))
    assert zero.comparison.others("weight_natural", zero.row("c")) == pytest.approx(2.0), "b is left"
    assert math.isnan(Network(1, network.rows[:1]).comparison.others("drift_ratio", network.rows[0]))


@pytest.mark.parametrize(("others", "usual"), [(1.0, 1.0), (50.0, 1.6), (0.001, 0.1)])
def test_the_usual_gain_is_that_of_the_others_as_far_as_that_is_ever_healthy(others, usual):
    sizes = {name: others * math.sqrt(info.fan_out) for name, info in LAYERS.items()}
    measurement = measured(1, weight_fro=sizes)
    network = Network.read(measurement, columns(measurement))
    assert network.usual_gain(network.row("a")) == pytest.approx(usual)


def test_a_learning_rate_is_that_of_the_schedule_without_a_corrections_multiplier():
    settings = Hyperparameters("SGD", "sgd", lr=0.5, peak=2.0)
    row = Row(LAYERS["a"], {"lr": 0.02, "lr_multiplier": 0.2}, settings)
    assert row.lr == pytest.approx(0.1)
    assert row.to_peak == pytest.approx(20)
    assert Row(LAYERS["a"], {}, settings).lr == 0.5, "as the settings have it, where it was not measured"
    assert Row(LAYERS["a"], {"lr": 9.0}, settings).to_peak == 1.0, "no schedule is known to fall only"
    assert Row(LAYERS["a"], {"lr": 0.0}, settings).to_peak == Row(LAYERS["a"], {}).to_peak == 1.0


@pytest.mark.parametrize(
    ("tied", "rows"),
    [
        ({}, {"tok", "a", "b", "c", "head"}),
        ({"head": "tok"}, {"a", "b", "c", "head"}),  # embedding and readout at once is a readout
        ({"c": "a"}, {"tok", "a", "b", "head"}),  # once
        ({"head": "tok", "c": "tok"}, {"a", "b", "c"}),  # one of two readers
    ],
)
def test_every_matrix_is_judged_once(tied, rows):
    measurement = measured(1)
    network = Network.read(measurement, columns(measurement), tied=tied)
    assert {row.info.name for row in network.rows} == rows
    assert set(network.vectors) == {"a.bias", "b.bias", "c.bias"}


@pytest.mark.parametrize(("names", "most"), [("", False), ("ab", False), ("abc", True)])
def test_exploded_is_what_most_of_five_matrices_have_done(names, most):
    network = Network.read(measured(1), columns(measured(1)))
    steps = {name: 1.1 if name in names else 0.9 for name in LAYERS}
    assert Network(1, network.rows, compared=network.compared, largest_steps=steps).exploded == most


def test_without_a_learning_rate_nothing_is_dead():
    still = {
        key: dict.fromkeys(LAYERS, 0.0) for key in ("update_natural", "update_ratio", "contribution", "drift_ratio")
    }
    for lr, dead in ((0.0, False), (0.01, True)):
        measurement = measured(1, lr=dict.fromkeys(LAYERS, lr), **still)
        found = findings(Network.read(measurement, columns(measurement)), SpectralCondition())
        assert any(finding.check == "dead" for finding in found) == dead


def test_columns_have_no_nan_and_know_lost_gradients():
    measurement = measured(
        1, update_natural=nothing("a"), contribution={"b": 0.0, "c": 0.0}, reasons={"contribution/b": LOST}
    )
    found = columns(measurement)
    assert set(found["update_natural"]) == set(LAYERS) - {"a"}
    assert {name: lost for name, lost in found["lost"].items() if lost} == {"b": 1.0}
    assert "lost" not in columns(measured(1, only=["lr"], reasons={"*/*": ZERO}))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_the_median_of_the_others_is_that_of_the_list_without_one(count):
    """With ties, and with a layer that has no size."""
    generator = torch.Generator().manual_seed(count)
    matrices = {f"{i}": torch.randn(4, 4, generator=generator) * (i % 3) for i in range(count)}
    network = network_of(matrices, "sgd")
    sizes = {name: float(torch.tensor(natural(m))) for name, m in matrices.items()}  # as float32 holds them
    for row in network.peers:
        others = [math.log(size) for name, size in sizes.items() if name != row.info.name and size > 0]
        expected = math.exp(statistics.median(others)) if others else math.nan
        assert network.comparison.others("update_natural", row) == pytest.approx(expected, rel=1e-12, nan_ok=True)
