"""On several processes, in every way to use them, the monitor shows what it shows on one with the whole batch."""

from __future__ import annotations

import copy
import math
from functools import cache

import pytest
import torch

from spectral_monitor import SpectralMonitor
from tests.distributed.fitting import fit, measure, plain
from tests.distributed.jobs import task
from tests.distributed.models import SIZE, batches
from tests.distributed.numbers import differences, near, of_weights
from tests.distributed.ways import WAYS, marks, networks

CORE = {
    ("ddp", "perceptron"),
    ("ddp_find_unused", "mixture"),
    ("fsdp2", "perceptron"),
    ("fsdp2", "transformer"),
    ("tp", "perceptron"),
    ("tp", "transformer"),
}


def cases(only=None):
    for way, spec in WAYS.items():
        for count in spec.processes:
            for network in networks(way):
                if only in (None, network):
                    one = task("fitting.measure", count, way=way, network=network)
                    core = count == 2 and (way, network) in CORE
                    yield pytest.param(one, id=str(one), marks=() if core else marks(way, count, network))


@cache
def alone(network):
    return measure("", network)


def expected(one):
    """Of the same network on one process; calls of an expert with no tokens are none there."""
    return alone(dict(one.arguments)["network"].replace(", empty calls", ""))


@pytest.mark.few(2)
@pytest.mark.parametrize("one", list(cases()))
def test_numbers_are_those_of_one_process(outcomes, one):
    results = outcomes[one].get()
    found = differences(expected(one)["measurements"], results[0]["measurements"])
    if dict(one.arguments)["way"].startswith("fsdp1"):
        # It gives zeros as gradients to experts nobody used, and so an update of 0 that is no other's, and a verdict
        # that they are dead; nothing is NaN.
        follows = ("contribution_spread", "summary/violations", ": verdicts ", ": states ")
        found = [
            text
            for text in found
            if not text.strip().endswith("is 0, not nan") and not any(key in text for key in follows)
        ]
    assert not found, f"{len(found)} differences:\n" + "\n".join(found[:40])


CLIPPED = [("ddp", "perceptron", 2), ("fsdp2", "perceptron", 2), ("hsdp", "perceptron", 4)]  # not FSDP1, says Lightning


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "one",
    [task("fitting.measure", count, way=way, network=network, largest=0.02) for way, network, count in CLIPPED],
    ids=str,
)
def test_numbers_of_gradients_that_the_trainer_clips(outcomes, one):
    """In a single process they are of the gradients before that: tests/engine/test_clipped_gradients.py."""
    expected = measure("", dict(one.arguments)["network"], largest=0.02)["measurements"]
    found = differences(expected, outcomes[one].get()[0]["measurements"])
    assert not found, f"{len(found)} differences:\n" + "\n".join(found[:40])
    free = alone(dict(one.arguments)["network"])["measurements"][0]["values"]
    factor = expected[0]["values"]["update_norm"][0] / free["update_norm"][0]
    assert factor < 0.9, "it was clipped"
    assert expected[0]["values"]["contribution"][0] == pytest.approx(factor * free["contribution"][0], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "one",
    [
        *(
            task("fitting.measure", count, way=way, network="transformer", tol=0.01)
            for way, count in (("ddp", 2), ("fsdp2", 2), ("tp", 2), ("hsdp", 4))
        ),
        pytest.param(
            task("fitting.measure", 4, way="fsdp2_tp", network="transformer", tol=0.01), marks=pytest.mark.exhaustive
        ),
    ],
    ids=str,
)
def test_the_same_numbers_at_the_default_tolerance(outcomes, one):
    """Lanczos stops early then, but everywhere at the same step or one later."""
    expected = measure("", "transformer", tol=0.01)["measurements"]
    assert differences(expected, outcomes[one].get()[0]["measurements"]) == []


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "one",
    [
        task("fitting.measure", 2, way=way, network=network, low_memory=True)
        for way, network in (("ddp", "perceptron"), ("fsdp2", "transformer"))
    ],
    ids=str,
)
def test_the_same_numbers_of_one_layer_after_the_other(outcomes, one):
    """With copies in host memory."""
    expected = alone(dict(one.arguments)["network"])["measurements"]
    assert differences(expected, outcomes[one].get()[0]["measurements"]) == []


@pytest.mark.few(2)
@pytest.mark.parametrize("one", list(cases()))
def test_all_processes_hold_the_same_bits(outcomes, one):
    first, *others = [repr(result["measurements"]) for result in outcomes[one].get()]  # repr of a float is exact
    assert all(other == first for other in others)


@pytest.mark.few(1)
@pytest.mark.parametrize("one", list(cases("perceptron")))
def test_norms_are_those_of_the_gathered_weights(outcomes, one):
    results = outcomes[one].get()
    for result in results:
        for index, measurement in enumerate(result["measurements"]):
            for i, layer in enumerate(measurement["layers"]):
                if layer["role"] == "vector":
                    continue
                name = layer["name"].removesuffix(".weight")
                for key, value in of_weights(result["weights"], index, name).items():
                    found = measurement["values"][key][i]
                    assert near(found, value, 1e-4 * value), f"step {index + 1}, {key}/{name}: {found}, not {value}"


def test_all_quantities_are_compared_where_they_have_values():
    """Else NaN would be compared with NaN."""
    seen = set()
    for network in ("perceptron", "transformer", "mixture"):
        for measurement in alone(network)["measurements"]:
            parts = (measurement["values"].items(), ((key, [value]) for key, value in measurement["summary"].items()))
            seen |= {key for part in parts for key, values in part if not all(map(math.isnan, values))}
    measurement = alone("transformer")["measurements"][-1]
    assert seen == {*measurement["values"], *measurement["summary"]}


@pytest.mark.few(1)
@pytest.mark.parametrize("network", ["perceptron", "transformer", "mixture"])
def test_the_rows_of_one_process_would_give_other_numbers(network):
    """Of every kind that depends on the rows, in the first step already, so the comparison tells."""
    monitor = SpectralMonitor(every_n_steps=1, tol=1e-6, drift_every=2, replay_samples=None)
    fit("", network, 3, [monitor], data=batches(network, 3, part=0, parts=2))
    found = differences(alone(network)["measurements"], [plain(m) for m in monitor.measurements])
    kinds = {text.split(": ")[1].partition("/")[0] for text in found if text.startswith("step 1")}
    dependent = {"update_norm", "contribution", "feature_rms", "feature_change", "alignment", "input_stable_rank"}
    assert dependent <= kinds


@pytest.mark.few(1)
@pytest.mark.parametrize("network", ["perceptron", "transformer", "mixture"])
def test_another_order_of_the_rows_is_within_the_tolerances(network):
    """Which is what several processes are, when they work; where all rows are used, so that they are the same."""
    loader, found = batches(network, 3), []
    order = torch.randperm(SIZE)
    for permuted in (False, True):
        if permuted:
            loader.dataset[:] = [tuple(t[order] for t in batch) for batch in loader.dataset]
        monitor = SpectralMonitor(every_n_steps=1, tol=1e-6, drift_every=2, max_rows=None, replay_samples=None)
        fit("", network, 3, [monitor], data=loader)
        found.append([plain(m) for m in monitor.measurements])
    assert differences(*found) == []


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("factor", [1.02, math.nan])
def test_any_other_value_is_noticed(factor):
    whole = alone("transformer")["measurements"]
    assert differences(whole, whole) == []
    unnoticed = []
    for key, column in whole[-1]["values"].items():
        for i, value in enumerate(column):
            other = copy.deepcopy(whole)
            other[-1]["values"][key][i] = value * factor if value == value else 1.0
            small = key in ("bfa", "bfa_cos", "sensitivity") and abs(whole[-1]["values"]["bfa_cos"][i]) < 0.3
            if value != 0 and not (small and factor == factor) and not differences(whole, other):
                unnoticed.append((key, i, value))
    assert not unnoticed


def test_the_oracle_knows_another_matrix():
    weights = [{"a.weight": torch.diag(torch.tensor(d))} for d in ([3.0, 1.0], [3.0, 2.0], [3.0, 4.0])]
    found = of_weights(weights, 1, "a")
    assert found["weight_norm"] == pytest.approx(3)
    assert found["update_norm"] == found["update_fro"] == pytest.approx(2)
    assert found["drift_ratio"] == pytest.approx(1)


@pytest.mark.parametrize("network", ["perceptron", "transformer"])
def test_there_are_verdicts_to_compare(network):
    assert all(measurement["verdicts"] for measurement in alone(network)["measurements"])


@pytest.mark.parametrize("network", ["perceptron", "transformer", "mixture"])
def test_there_are_losses_to_compare(network):
    """Half of the residuals' size or so: they are known, of outputs that are of order 1."""
    for measurement in alone(network)["measurements"]:
        assert 0 < measurement["summary"]["loss_distance"] < 10
