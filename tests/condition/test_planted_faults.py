"""Real training: planted faults are named with their cause, tuned runs are left alone."""

from __future__ import annotations

import pytest
import torch

from benchmarks.rates.faults import FAULTS, begin, examine, is_found, named
from benchmarks.rates.tuned import DATA, TASKS, start, train
from spectral_monitor import SpectralProbe

QUICK = ("hidden lr x100", "biases at -100", "readout init x30")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in FAULTS]
)
def test_a_fault_is_named_with_its_cause(name):
    fault = FAULTS[name]
    told = examine(fault, DATA, seed=1, narrow=True)
    assert is_found(fault, told), told
    # What else is named follows from the fault, and says so. A rate that is planted is that of the bias beside it too.
    beside = [f"{layer}.bias" for layer in fault.layers]
    planted = (*fault.layers, *(name for name in beside if fault.rule(name, torch.zeros(1)) != 1))
    also = {layer: other for layer, other in told.items() if layer not in planted and not other.root}
    assert also == {}


@pytest.mark.parametrize("name", ["biases at -100", pytest.param("all rates x1000", marks=pytest.mark.slow)])
def test_a_fault_that_disturbs_many_layers_is_one_root(name):
    fault = FAULTS[name]
    measurements, _ = train(begin(fault, DATA, seed=1, narrow=True), 10 * fault.every, fault.every)
    (root,) = measurements[-1].roots
    assert (root.layer, root.cause) == (fault.layers[0], fault.cause)
    assert root.consequences
    assert {verdict.root for verdict in measurements[-1].verdicts if not verdict.is_root} == {root.layer}


@pytest.mark.slow
@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("task", TASKS)
def test_a_tuned_run_is_left_alone(task, every):
    run = start(TASKS[task], DATA, seed=3)
    assert named(train(run, TASKS[task].steps, every)[0]) == {}


@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("task", ["digits MLP, Adam", pytest.param("CIFAR MLP, SGD", marks=pytest.mark.slow)])
def test_a_readout_that_begins_at_zero_is_no_fault(task, every):
    run = start(TASKS[task], DATA, plant=lambda model: torch.nn.init.zeros_(model.layers[-1].weight))
    assert named(train(run, 60, every)[0]) == {}


@pytest.mark.slow
def test_a_matrix_that_is_embedding_and_readout_at_once_is_judged_as_readout():
    """A hundred times the learning rate is named once, of the readout; without it the run is healthy."""

    def tie(model):
        torch.nn.init.normal_(model.tok.weight, std=0.02)
        model.head.weight = model.tok.weight

    def states(factor):
        run = start(
            TASKS["char transformer, AdamW"],
            DATA,
            plant=tie,
            width=32,
            rule=lambda name, parameter: factor if name == "tok.weight" else 1.0,
        )
        probe = SpectralProbe(run.model, run.optimizer, every_n_steps=1, quantities="light", mode="observe")
        assert {layer.info.name: layer.tied_to for layer in probe.anatomy.layers if layer.tied_to} == {"head": "tok"}
        measurements = train(run, 30, 1)[0]
        return named(measurements), measurements[-1].states

    told, healthy = states(1.0)
    assert told == {}
    assert healthy["tok"] == healthy["head"]
    assert str(healthy["head"]) == "healthy"
    told, off = states(100.0)
    assert told["head"].cause == "lr_too_large"
    assert "tok" not in told
    assert off["tok"].state == off["head"].state == "off"
