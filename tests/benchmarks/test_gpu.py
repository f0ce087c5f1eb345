"""What ``make gpu`` does, as far as a machine without an accelerator shows it."""

from __future__ import annotations

import inspect
import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from benchmarks.cost.models import Size
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import cost as gpu_cost
from benchmarks.gpu.trainers import Outcome
from spectral_monitor.functional import (
    activation_ratio,
    backward_feature_cosine,
    contribution,
    feature_rms,
    frobenius_norm,
    kernel_change,
)

TINY = Size(32, 1, 2, 2, 16, vocab=20)


def test_without_an_accelerator_it_says_so(monkeypatch, capsys):
    before = gpu.PAGE.read_text() if gpu.PAGE.exists() else None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 0
    assert capsys.readouterr().out == gpu.NO_DEVICE + "\n"
    assert before == (gpu.PAGE.read_text() if gpu.PAGE.exists() else None)


@pytest.mark.slow
def test_the_same_device_gives_the_same_numbers_and_another_training_does_not(monkeypatch):
    found = gpu.differences("cpu", TINY)
    assert {"weight_norm", "update_norm", "feature_change"} <= {one.key for one in found}
    assert all(one.worst == 0 and one.compared > 0 for one in found)
    original, made = gpu.Loop.__post_init__, []

    def other(loop):
        original(loop)
        made.append(loop)
        with torch.no_grad():
            loop.model.head.weight.mul_(len(made))

    monkeypatch.setattr(gpu.Loop, "__post_init__", other)
    by_key = {one.key: one for one in gpu.differences("cpu", TINY)}
    assert by_key["weight_norm"].worst == pytest.approx(0.5, abs=0.01), "of the head, twice as large"
    assert by_key["weight_norm"].layer == "head"


def test_differences_are_relative_and_a_missing_number_is_the_largest():
    assert gpu.relative(3.0, 4.0) == gpu.relative(4.0, 3.0) == 0.25
    assert gpu.relative(math.nan, 1.0) == math.inf
    assert math.isnan(gpu.relative(math.nan, math.nan))


@pytest.mark.parametrize("half", [False, True])
def test_bits_are_compared(monkeypatch, half):
    assert gpu.same_bits("cpu", "standard", TINY, half, steps=2)
    original = gpu.Loop.step

    def touches(loop, probe=None):
        original(loop, probe)
        if probe is not None:
            next(loop.model.parameters()).data.view(-1)[0] += 1e-6

    monkeypatch.setattr(gpu.Loop, "step", touches)
    assert not gpu.same_bits("cpu", "standard", TINY, half, steps=2)


def test_only_waits_are_counted():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        warnings.warn("called a synchronizing CUDA operation (Triggered internally at ...)", UserWarning, stacklevel=1)
        warnings.warn("another thing", UserWarning, stacklevel=1)
    assert gpu.synchronizations(seen) == 1


def test_a_page_is_what_its_numbers_make_of_it():
    """From runs on the CPU: every part of it is there, and a failure is told."""
    costs = {"tiny": [gpu.cost(gpu.Loop(TINY, "cpu"), tier, lambda: None, rounds=2) for tier in gpu.TIERS]}
    assert all(0 < one.low <= one.ratio <= one.high for one in costs["tiny"])
    numbers = gpu.differences("cpu", TINY, steps=1)
    shares, ways = [("tiny", "light", 0.0123, 7)], {"float32": Outcome(True, True, 9, {}, 0.002)}
    text = gpu.page({"device": "none"}, numbers, {"a": True, "b": False}, {"light": (0, 4)}, costs, shares, ways)
    for row in ("| device | none |", "| a | the same |", "| b | **differ** |", "| light | 0 | 4 |", "| tiny | light |"):
        assert row in text
    assert "| tiny | light | 1.2 % | 7 |" in text
    assert "| float32 | the same | 2.0e-03 | 9 |" in text
    assert f"{sum(one.compared for one in numbers):,} pairs" in text
    assert " 1.10 |" in text


def test_the_share_of_time_is_that_of_watched_steps_after_the_first(monkeypatch):
    """A clock of a second a step, of ten where the step is measured."""
    now = [0.0]

    def step(loop, probe=None):
        before = 0 if probe is None else len(probe.measurements)
        original(loop, probe)
        now[0] += 1.0 if probe is None or len(probe.measurements) == before else 10.0

    original = gpu.Loop.step
    monkeypatch.setattr(gpu.Loop, "step", step)
    monkeypatch.setattr(gpu_cost, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(gpu_cost, "FREE_STEPS", 4)
    part, measured = gpu.share(gpu.Loop(TINY, "cpu"), "light", lambda: None, steps=12)
    assert measured == 2  # of steps 5 to 16 the eighth and the last
    assert part == 18 / 12


# What can be seen of another device without one: tensors on a "cuda" that has no values. Mixing devices, or looking at
# values, raises.

FORMULAS = (feature_rms, contribution, activation_ratio, kernel_change, backward_feature_cosine)


def on_cuda():
    return torch.empty(8, 5, device="cuda")


@pytest.mark.parametrize("formula", FORMULAS)
def test_formulas_stay_on_the_device_and_look_at_no_value(formula):
    with FakeTensorMode():
        given = [on_cuda() for p in inspect.signature(formula).parameters.values() if p.default is p.empty]
        assert formula(*given).device.type == "cuda"


def test_a_mix_of_devices_and_a_look_would_be_seen():
    with FakeTensorMode():
        with pytest.raises(RuntimeError, match="device"):
            contribution(on_cuda(), torch.empty(8, 5))
        with pytest.raises(DataDependentOutputException):
            frobenius_norm(on_cuda())
