"""Hugging Face's Trainer on several processes: the numbers of one process, the same training, resuming."""

from __future__ import annotations

import math
from functools import cache

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'spectral-monitor[hf]'")

from spectral_monitor import load
from tests.distributed import huggingface
from tests.distributed.jobs import task
from tests.distributed.numbers import differences

CASES = [
    *(
        (way, network, accumulate)
        for way in ("ddp", "fsdp2")
        for network in huggingface.NETWORKS
        for accumulate in (1, 2)
    )
]
QUICK = {("ddp", "language model", 2)}


def cases(function, some=CASES, **more):
    for way, network, accumulate in some:
        one = task(f"huggingface.{function}", 2, way=way, network=network, accumulate=accumulate, **more)
        quick = (way, network, accumulate) in QUICK and function == "measure"
        yield pytest.param(one, id=str(one), marks=() if quick else pytest.mark.slow)


@cache
def alone(network, accumulate):
    return huggingface.measure("", network, accumulate)["measurements"]


@pytest.mark.parametrize("one", list(cases("measure")))
def test_numbers_are_those_of_one_process(outcomes, one):
    arguments, results = dict(one.arguments), outcomes[one].get()
    expected = alone(arguments["network"], arguments["accumulate"])
    assert [m["step"] for m in expected] == [1, 2, 3]
    for result in results:
        assert result["model"].startswith({"ddp": "DistributedDataParallel", "fsdp2": "FSDP"}[arguments["way"]])
        found = differences(expected, result["measurements"])
        assert not found, f"{len(found)} differences:\n" + "\n".join(found[:40])
    assert len({repr(result["measurements"]) for result in results}) == 1, "the same in all processes"


@pytest.mark.slow
def test_there_is_enough_to_compare():
    """And half of the rows would give other numbers."""
    for network in huggingface.NETWORKS:
        first = alone(network, 1)[0]
        assert first["summary"]["loss_change"] < 0
        assert first["summary"]["edge"] > 0
        assert max(first["values"]["feature_change"]) > 0
        half = huggingface.measure("", network, per_device_train_batch_size=huggingface.ROWS // 2)["measurements"]
        found = {text.split(": ")[1].split(" is ")[0].split("/")[0] for text in differences(alone(network, 1), half)}
        assert {"update_norm", "feature_change", "contribution", "summary"} <= found


@pytest.mark.parametrize("one", list(cases("compare")))
def test_training_is_not_changed(outcomes, one):
    for rank, result in enumerate(outcomes[one].get()):
        assert not result["differences"], f"process {rank}"
        assert result["measured"] == 3
        assert all(result["compared"][kind] > 5 for kind in ("parameter", "optimizer", "random"))


@pytest.mark.parametrize(
    "one", list(cases("compare", [("ddp", "net", 1), ("fsdp2", "language model", 1)], watch="naive"))
)
def test_a_naive_callback_is_found_out(outcomes, one):
    for result in outcomes[one].get():
        assert result["differences"]


CORRECTED = [("ddp", "net", 2), ("ddp", "language model", 2), ("fsdp2", "language model", 1)]
CLIPPED = [("ddp", "net", 1), ("fsdp2", "language model", 1)]


@pytest.mark.parametrize("one", [*cases("correct", CORRECTED), *cases("correct", CLIPPED, max_grad_norm=0.05)])
def test_a_correction_sees_how_far_steps_go_as_one_process_does(outcomes, one):
    arguments = dict(one.arguments)
    expected = huggingface.correct(**{**arguments, "way": ""})
    for result in outcomes[one].get():
        assert len(result["edges"]) == 5
        assert sum(map(math.isfinite, result["edges"])) == 4, "the first step is a trial, and tiny"
        assert result["edges"] == pytest.approx(expected["edges"], rel=0.02, nan_ok=True)
        assert result["lr"] == pytest.approx(expected["lr"], rel=1e-3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hf")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_resumed_it_measures_what_it_would_have(tmp_path, way):
    from tests.distributed.jobs import run

    whole = task("huggingface.resume", 2, way=way, network="language model", folder=str(tmp_path / "whole"))
    file = "spectral_monitor_1.pt"
    lost = task("huggingface.resume", 2, way=way, network="net", folder=str(tmp_path / "lost"), lose=file)
    outcomes = run([whole, lost])
    for result in outcomes[whole].get():
        assert not result["said"]
        assert [m["step"] for m in result["resumed"]] == [4, 5, 6]
        assert repr(result["resumed"]) == repr(result["through"][3:])
    assert [m.step for m in load(tmp_path / "whole" / "stopped").measurements] == [1, 2, 3, 4, 5, 6]
    first, second = outcomes[lost].get()
    assert len(first["said"]) == 1
    assert not second["said"], "the first process speaks for all"
    assert f"process 1: {tmp_path / 'lost' / 'stopped' / 'checkpoint-3' / file} is missing" in first["said"][0]
    assert [m["step"] for m in first["resumed"]] == [4, 5, 6]
    assert repr(first["resumed"]) == repr(second["resumed"])
