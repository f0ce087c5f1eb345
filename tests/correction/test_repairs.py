"""Real training: planted faults of learning rates are made up for, tuned runs are not touched."""

from __future__ import annotations

import pytest

from benchmarks.rates.faults import FAULTS, begin
from benchmarks.rates.repair import final_loss, healthy_loss
from benchmarks.rates.tuned import DATA, TASKS, start
from spectral_monitor.condition import NETWORK

LEARNT = 0.003
"""A loss of the digits that are known by heart, of which a smaller one says nothing."""

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::spectral_monitor.SpectralConditionWarning")]


@pytest.mark.parametrize("name", ["hidden lr x100", "hidden lr /100", "readout lr x30", "rule of SGD under AdamW"])
def test_a_fault_of_learning_rates_is_repaired(name):
    fault = FAULTS[name]
    task = TASKS[fault.task]
    loss, multipliers = final_loss(begin(fault, DATA), task.steps, 5, correct=True)
    healthy = healthy_loss(fault.task, fault.width or task.width, DATA)
    assert loss <= 1.1 * healthy or loss < LEARNT
    assert multipliers
    assert set(fault.layers) - {NETWORK} <= set(multipliers)


@pytest.mark.parametrize("name", list(TASKS))
def test_a_tuned_run_ends_as_it_would_have(name):
    plain, _ = final_loss(start(TASKS[name], DATA, seed=1), TASKS[name].steps, 10, correct=False)
    corrected, multipliers = final_loss(start(TASKS[name], DATA, seed=1), TASKS[name].steps, 10, correct=True)
    assert multipliers == {}
    assert corrected == plain
