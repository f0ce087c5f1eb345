"""The numbers that loggers are given: which, how many, and that each is what it is called."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest
import torch

from spectral_monitor import LayerInfo, Measurement
from spectral_monitor.quantities import TIERS
from spectral_monitor.reporting.content.essentials import OVERLAID, checked_log, essential_keys, essentials, grouped
from tests.reporting import gpt

NAMES = [info.name for info in gpt.LAYERS]
C_FC = [f"model.transformer.h.{k}.mlp.c_fc" for k in range(12)]


def network(names, seed=0, keys=TIERS["standard"]):
    """A measurement of every quantity of matrices of these names."""
    generator = torch.Generator().manual_seed(seed)
    layers = tuple(LayerInfo(name, "operator", 8, 8, (8, 8)) for name in names)
    values = {key: torch.rand(len(names), generator=generator) + 0.01 for key in keys}
    bands = {"update_natural": torch.tensor([[0.025, 3.2, 0.4]] * len(names))}
    return Measurement(5, layers, values, dict.fromkeys(gpt.KEYS, 1.0) | {"violations": 0.0}, bands=bands)


def test_a_family_has_its_lowest_median_and_highest():
    one = gpt.measured(roots=[gpt.root(value=8.0)])
    found = essentials(one)
    values = sorted(one.values["feature_change"][[NAMES.index(name) for name in C_FC]].tolist())
    stem = "spectral_feature_change/model.transformer.h.N.mlp.c_fc"
    for which, value in (("lowest", values[0]), ("median", statistics.median_low(values)), ("highest", values[-1])):
        assert found[f"{stem}/{which}"] == value
    every = [one.value("feature_change", name) for name in gpt.MATRICES]
    assert found["spectral_feature_change/all/median"] == statistics.median_low(every)
    assert found["spectral_feature_change/all/highest"] == max(every)
    assert found["spectral_feature_change/model.lm_head"] == one.value("feature_change", "model.lm_head")
    assert not [key for key in found if ".h.7." in key], "of twelve blocks none has numbers of its own"


def test_the_size_of_updates_is_against_typical_as_a_power_of_two():
    found = essentials(gpt.measured(roots=[gpt.root(value=8.0)]))
    assert found["spectral_vs_typical_log2/model.transformer.h.N.mlp.c_fc/highest"] == pytest.approx(math.log2(80))
    assert found["spectral_vs_typical_log2/limits/low"] == pytest.approx(-3, abs=1e-6)
    assert found["spectral_vs_typical_log2/limits/high"] == pytest.approx(3, abs=1e-6)
    one = network(["a", "b"])
    one.values["update_natural"][:] = torch.tensor([0.0, math.inf])
    found = essentials(one)
    assert (found["spectral_vs_typical_log2/a"], found["spectral_vs_typical_log2/b"]) == (-24.0, 24.0)
    other = replace(network(["a", "b"]), bands={"weight_natural": torch.tensor([[0.1, 10.0, 0.5]] * 2)})
    other.values["weight_natural"][0] = 4.0
    assert essentials(other)["spectral_weight_natural_vs_typical_log2/a"] == pytest.approx(3.0)


def test_a_layer_that_has_had_a_verdict_has_its_own_numbers():
    quiet, told = gpt.measured(), gpt.measured(roots=[gpt.root()])
    told = replace(told, flags={gpt.ROOTS[0]: 1.0, gpt.ROOTS[1]: 0.0})
    more = essentials(told).keys() - essentials(quiet).keys()
    keys = ("vs_typical_log2", "update_ratio", "feature_change", "weight_natural")
    assert more == {f"spectral_{key}/{root}" for key in keys for root in gpt.ROOTS}
    many = replace(told, flags={name: float(k >= 30) for k, name in enumerate(NAMES[2:60])})
    assert len(essentials(many).keys() - essentials(quiet).keys()) == 8 * len(keys)


def test_a_small_network_has_every_matrix_and_what_lies_over_other_runs():
    found = essentials(network([f"net.{k}" for k in range(16)]))
    sections = {"vs_typical_log2", "lr_multiplier", *essential_keys()}
    expected = {f"spectral_{key}/net.{k}" for key in sections for k in range(16)}
    expected |= {f"spectral_{key}" for key in OVERLAID}
    expected |= {"spectral_vs_typical_log2/limits/low", "spectral_vs_typical_log2/limits/high"}
    assert set(found) - expected == {"spectral/summary/violations"}
    assert expected <= set(found)


NETWORKS = {
    "a hundred in a row": [f"net.{k}" for k in range(100)],
    "no two alike": [f"layer{k}" for k in range(100)],
    "pairs": [f"{'abcdefghij'[k % 10]}{'xyzuv'[k % 5]}{k // 20}.{k % 2}.w" for k in range(100)],
    "twelve and single ones": [*(f"h.{k}.{'abcdefgh'[k % 8]}" for k in range(80)), *(f"one{k}" for k in range(20))],
    "families of four": [f"stage{k // 4}.{k % 4}.w" for k in range(100)],
    "seventeen": [f"h.{k}.w" for k in range(8)] + [f"x{k}" for k in range(9)],
}


@pytest.mark.parametrize("names", NETWORKS.values(), ids=NETWORKS)
def test_a_hundred_matrices_have_600_numbers_at_most(names):
    one = network(list(dict.fromkeys(names)))
    one = replace(one, flags=dict.fromkeys((info.name for info in one.layers), 1.0))
    bands = {"update_natural": one.bands["update_natural"]}
    assert len(essentials(replace(one, bands=bands))) <= 600
    groups = grouped(one.layers)
    placed = [*groups.singles, *(i for places in groups.families.values() for i in places)]
    assert sorted(placed) == list(range(len(one.layers))), "each is in one place"


def test_gpt_2s_75_matrices_take_under_400_numbers_of_2400():
    """In this many numbers the tags of GPT's charts are; lr_multiplier, which only a correction has, is among them."""
    one = network(gpt.MATRICES)
    every = sum(values.isfinite().sum() for values in one.values.values())
    assert len(one.scalars()) == every + len(one.summary) + len(one.flags)
    assert len(essentials(one)) < 400 < 1800 < every


def test_everything_and_patterns():
    one = network([f"h.{k}.w" for k in range(20)])
    some = essentials(one)
    assert essentials(one, "all") == some | one.scalars()
    more = essentials(one, ["contribution/*", "*/h.3.w"])
    assert more.keys() - some.keys() == {
        *(f"spectral_contribution/h.{k}.w" for k in range(20)),
        *(f"spectral_{key}/h.3.w" for key in TIERS["standard"]),
    }
    assert more["spectral_contribution/h.4.w"] == one.value("contribution", "h.4.w")
    deep = network([f"h[{k}].w" for k in range(20)])
    assert essentials(deep, ["contribution/h[3].w"]).keys() - essentials(deep).keys() == {
        "spectral_contribution/h[3].w"
    }
    asked = essentials(network(["a", "b"], keys=["bfa", "lr"]), requested=["bfa"])
    assert {"spectral_bfa/a", "spectral_bfa/b"} <= asked.keys()
    assert not [key for key in asked if "spectral_lr" in key]


def test_a_correction_is_logged_where_there_is_one():
    one = network(["a", "b"], keys=["lr_multiplier", "update_natural"])
    assert "spectral_lr_multiplier/a" in essentials(one)
    one.values["lr_multiplier"][:] = 1.0
    assert not [key for key in essentials(one) if "multiplier" in key]


def test_what_is_not_finite_is_left_out():
    one = network(["a", "b"])
    one.values["feature_change"][:] = torch.tensor([math.nan, 2.0])
    one.values["drift_ratio"][:] = math.inf
    found = essentials(one)
    assert all(map(math.isfinite, found.values()))
    assert "spectral_feature_change/a" not in found
    assert found["spectral_feature_change/all/highest"] == 2.0
    assert not [key for key in found if "drift_ratio" in key]


@pytest.mark.parametrize(
    ("log", "message"),
    [
        ("everything", "log must be 'essential', 'all' or a list of patterns, got 'everything'"),
        ("contribution/*", r"for one pattern pass a list: \['contribution/\*'\]"),
        (3, "log must be 'essential'"),
        (["contributoin/*"], "begins with no quantity.*did you mean 'contribution'"),
        (["net.2"], "begins with no quantity.*valid ones: weight_norm"),
    ],
)
def test_what_cannot_be_logged_is_refused(log, message):
    with pytest.raises(ValueError, match=message):
        checked_log(log)


def with_gains(names):
    """The matrices, and two vectors for each of half of them."""
    one = network([*names, *(f"{name}.{kind}" for name in names[::2] for kind in ("bias", "gain"))])
    roles = ["operator" if i < len(names) else "vector" for i in range(len(one.layers))]
    return replace(one, layers=tuple(replace(info, role=role) for info, role in zip(one.layers, roles, strict=True)))


@pytest.mark.parametrize("names", [gpt.MATRICES, NETWORKS["a hundred in a row"]], ids=["GPT", "a hundred"])
def test_a_measured_step_takes_a_quarter_of_the_bytes_that_every_number_takes(names):
    """In TensorBoard's protocol buffers, and as W&B writes an item: the key, and the value as JSON."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    def sizes(scalars):
        board = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()])
        return board.ByteSize(), sum(len(key) + len(repr(value)) for key, value in scalars.items())

    one = with_gains(names)
    for few, every in zip(sizes(essentials(one)), sizes(one.scalars()), strict=True):
        assert few <= every / 4
