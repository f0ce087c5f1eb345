"""Which steps are measured, by a number or in words, and what of them."""

from __future__ import annotations

import math
import re
from contextlib import nullcontext
from functools import partial
from inspect import signature
from itertools import pairwise

import pytest
import torch
from torch import nn

from spectral_monitor import LRCorrection, SpectralMonitor, SpectralProbe
from spectral_monitor.engine import Settings
from spectral_monitor.engine.schedule import DEFAULT_SCHEDULE, Schedule, Timetable
from spectral_monitor.engine.weights import norms
from spectral_monitor.integrations.hf import SpectralCallback
from spectral_monitor.monitoring.supervisor import _first_steps
from spectral_monitor.quantities import QUANTITIES, TIERS
from tests.one_step import training_step

DRIFT = ("feature_rms", "feature_drift")


def trained(every, quantities, steps, **more):
    """A probe after some steps of a small network."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    probe = SpectralProbe(net, optimizer, every_n_steps=every, quantities=quantities, **more)
    for _ in range(steps):
        with training_step(probe, optimizer):
            net(torch.randn(8, 4)).square().mean().backward()
    return probe


class Counted(nn.Module):
    """Counts its forwards; its matrices are large enough for estimates."""

    forwards = 0

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(80, 80)

    def forward(self, x):
        type(self).forwards += 1
        return self.net(x)


def hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize(
    ("given", "until", "expected"),
    [
        (1, 4, [1, 2, 3, 4]),
        (50, 160, [50, 100, 150]),
        ("every 50", 160, [50, 100, 150]),
        ("1,2,4,8,...,every 100", 320, [1, 2, 4, 8, 16, 32, 64, 100, 200, 300]),
        ("1, 10, 100, ..., every 1000", 2500, [1, 10, 100, 1000, 2000]),
        ("2, 3, ..., every 12", 30, [2, 3, 4, 6, 9, 12, 24]),
        ("5, 7, every 6", 20, [5, 6, 7, 12, 18]),
        ("1, 10, 30", 100, [1, 10, 30]),
        ("200, every 50", 210, [50, 100, 150, 200]),
    ],
)
def test_steps_in_words(given, until, expected):
    schedule = Schedule.of(given)
    assert [step for step in range(1, until + 1) if schedule.due(step)] == expected


def test_a_step_is_not_looked_for_among_all_first_ones():
    class Number(int):
        """Counts what it is compared with."""

        compared = 0
        __hash__ = int.__hash__

        def __eq__(self, other):
            type(self).compared += 1
            return int.__eq__(self, other)

    schedule = Schedule.of("1000, 1001, ..., every 1000000")
    assert len(schedule.first) > 5000
    assert [schedule.due(Number(step)) for step in (7, 999, 1000, 1001)] == [False, False, True, True]
    assert Number.compared < 10


@pytest.mark.parametrize(
    "given",
    [
        0,
        -3,
        True,
        2.5,
        None,
        "5",
        "",
        "often",
        "every",
        "every 0",
        "every 5, 7",
        "4, 2",
        "2, 2",
        "0, 1",
        "1, ..., every 9",
        "1, 2, ...",
        "..., every 9",
        "1, 2, ..., 9",
        "1,, 2",
        "-1, 5",
    ],
)
def test_what_stands_for_nothing_is_refused(given):
    with pytest.raises(ValueError, match=r"every_n_steps must be an integer >= 1, or steps in words such as .*; got"):
        Schedule.of(given)


def steps_measured(every, **more):
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    probe = SpectralProbe(net, optimizer, every_n_steps=every, quantities="light", **more)
    for _ in range(30):
        with training_step(probe, optimizer):
            net(torch.randn(8, 4)).square().mean().backward()
    return [measurement.step for measurement in probe.measurements]


def test_the_probe_measures_these_steps():
    assert steps_measured("1, 3, ..., every 20") == [1, 3, 9, 20]
    assert steps_measured("5, 6") == [5, 6]


def test_a_correction_sees_the_first_steps_before():
    """Each an eighth later than the one before, as long as that is sooner than every 20th."""
    correction = {"mode": "correct", "correction": LRCorrection("target")}
    assert steps_measured("6, every 20", **correction) == [*range(1, 17), 18, 20, 22, 24, 27, 30]
    spacing = [b - a for a, b in pairwise(sorted(_first_steps(20)))]
    assert spacing == sorted(spacing)
    assert max(spacing) <= 20


@pytest.mark.parametrize(
    ("given", "quantities", "expected"),
    [
        ({"light": 2, "standard": 3}, ["lr", "bfa"], {2: {"lr"}, 3: {"bfa"}, 4: {"lr"}, 6: {"lr", "bfa"}}),
        (
            {"light": 3, "lr": 2},
            ["lr", "update_norm"],
            {2: {"lr"}, 3: {"update_norm"}, 4: {"lr"}, 6: {"lr", "update_norm"}},
        ),
        ({"lr": "1, 5"}, ["lr"], {1: {"lr"}, 5: {"lr"}}),
        ({"light": 4, "standard": 4}, ["lr", "bfa"], {4: {"lr", "bfa"}}),
        (3, ["lr", "bfa"], {3: {"lr", "bfa"}, 6: {"lr", "bfa"}}),
    ],
)
def test_each_quantity_has_its_interval(given, quantities, expected):
    timetable = Timetable.of(given, quantities)
    assert {step: set(keys) for step in range(1, 7) if (keys := timetable.due(step))} == expected


def test_a_tier_stands_for_its_own_quantities():
    timetable = Timetable.of({"light": 2, "standard": 3, "full": 5}, TIERS["full"])
    for step, tier in ((2, "light"), (3, "standard"), (5, "full")):
        assert timetable.due(step) == {key for key in TIERS["full"] if QUANTITIES[key].tier == tier}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"light": 10}, "every_n_steps has no interval for 'feature_rms'; give it one, or its tier: 'standard'"),
        ({}, "every_n_steps has no interval for 'weight_norm'; give it one, or its tier: 'light'"),
        ({"light": 1, "standard": 2, "full": 5}, "every_n_steps: 'full' is not measured. Measured: light, standard, "),
        ({"light": 1, "standard": 2, "bfk_ratio": 5}, "every_n_steps: 'bfk_ratio' is not measured. Measured: light, "),
        (
            {"light": 1, "standard": 2, "update_nrom": 5},
            "'update_nrom' is not measured; did you mean 'update_norm'? Me",
        ),
        (
            {"lihgt": 1, "standard": 2},
            "every_n_steps: 'lihgt' is not measured; did you mean 'light'? Measured: light, ",
        ),
        ({"light": 0, "standard": 2}, "every_n_steps['light'] must be an integer >= 1, or steps in words such as "),
        (
            {"light": "often", "standard": 2},
            'such as "1, 2, 4, 8, ..., every 100" or "1, 10, every 1000"; got \'often\'',
        ),
    ],
)
@pytest.mark.parametrize("make", [Settings, SpectralMonitor, partial(SpectralProbe, None, None, every_n_steps=1)])
def test_a_mapping_that_does_not_fit_is_refused_before_there_is_anything_to_train(make, given, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        make(every_n_steps=given, quantities="standard")


def test_the_probe_measures_what_is_due():
    probe = trained({"light": 2, "feature_rms": 3}, ["update_norm", "lr", "feature_rms"], steps=6)
    found = {m.step: list(m.values) for m in probe.measurements}
    assert found == {
        2: ["update_norm", "lr"],
        3: ["feature_rms"],
        4: ["update_norm", "lr"],
        6: ["update_norm", "lr", "feature_rms"],
    }


@pytest.mark.slow
def test_values_are_those_of_a_run_that_measures_everything_at_every_step():
    """All but what has happened since the start, which is measured at every fifth of other steps."""
    every, some = trained(1, "full", 12), trained({"light": 2, "standard": 3, "full": 4}, "full", 12)
    whole = {m.step: m for m in every.measurements}
    for m in some.measurements:
        for key in [key for key in m.values if "probe" not in QUANTITIES[key].needs]:
            torch.testing.assert_close(m.values[key], whole[m.step].values[key], rtol=0, atol=0, equal_nan=True)
        for name in m.summary.keys() - {"overhead_ms", "skipped_updates", "linearity"}:
            assert m.summary[name] == whole[m.step].summary[name] or math.isnan(m.summary[name]), (m.step, name)
    summaries = {m.step: set(m.summary) for m in some.measurements}
    always = {"overhead_ms", "skipped_updates", "violations"}
    light = {"loss_change_predicted", "contribution_spread", "readout_share", "worst_layer_ratio", "stale_gradient"}
    light |= {"unfit_loss_input", "eval_share", "dropout_largest", "clip_factor"}
    assert summaries[2] == always | light
    assert summaries[3] == always | {"final_layer_alignment", "loss", "loss_change", "loss_distance", "feature_error"}
    assert summaries[6] == summaries[2] | summaries[3] | {"edge", "critical_lr"}


def test_drift_of_features_has_a_clock_that_counts_its_own_steps():
    probe = trained({"light": 2, "feature_rms": 2, "feature_drift": 3}, [*TIERS["light"], *DRIFT], 24, drift_every=2)
    known = [m.step for m in probe.measurements if "feature_drift" in m.values and m.value("feature_drift", "0") >= 0]
    assert known == [3, 9, 15, 21]


@pytest.mark.parametrize(
    ("step", "forwards", "hooked", "estimates"),
    [(2, 1, False, 3), (3, 1, True, 0), (4, 2, True, 3), (5, 1, False, 0), (6, 1, True, 3)],
)
def test_only_what_is_due_is_paid_for(monkeypatch, step, forwards, hooked, estimates):
    """Step 2: light only; 3: sizes of features; 4: light and a forward; 5: nothing; 6: light and sizes of features."""
    torch.manual_seed(0)
    net, runs = Counted(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    quantities = ["update_norm", "weight_norm", "drift_ratio", "feature_rms", "feature_change"]
    intervals = {"light": 2, "feature_rms": 3, "feature_change": 4}
    probe = SpectralProbe(net, optimizer, every_n_steps=intervals, quantities=quantities, exclude=["*.bias"])
    estimate = norms.spectral_estimates

    def counting(stacks, *more, **others):
        runs.extend(A.shape[0] for A in stacks)
        return estimate(stacks, *more, **others)

    monkeypatch.setattr(norms, "spectral_estimates", counting)
    for now in range(1, step + 1):
        Counted.forwards = 0
        runs.clear()
        with training_step(probe, optimizer):
            net(torch.randn(8, 80)).square().mean().backward()
            assert now < step or (hooks(net) > 0) == hooked
            assert bool(optimizer._optimizer_step_post_hooks) == (now != 1 and now != 5)
    assert (Counted.forwards, sum(runs)) == (forwards, estimates)
    assert hooks(net) == 0


def test_training_is_the_same_with_a_mapping():
    def weights(every):
        probe = None
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        if every is not None:
            probe = SpectralProbe(net, optimizer, every_n_steps=every, quantities="full")
        seen = []
        for _ in range(12):
            with probe.step() if probe else nullcontext():
                optimizer.zero_grad()
                net(torch.randn(8, 4)).square().mean().backward()
                optimizer.step()
            seen.append([*(t.clone() for t in net.state_dict().values()), torch.get_rng_state()])
        return seen

    plain, measured = weights(None), weights({"light": 2, "standard": 3, "full": 4})
    for one, other in zip(plain, measured, strict=True):
        assert all(map(torch.equal, one, other))


def test_a_correction_has_all_it_needs_at_its_own_steps():
    """Its aim is due at every 20th step; what else it needs is due at others too, but then it is not corrected."""
    intervals = {"update_natural": 20, "light": 7, "standard": 30}
    correction = {"mode": "correct", "correction": LRCorrection("target")}
    probe = trained(intervals, ["update_natural", "feature_rms"], 60, **correction)
    needed = set(LRCorrection("target").quantities)
    found = {m.step: set(m.values) for m in probe.measurements}
    others = needed - {"update_natural"}
    own = {*range(1, 17), 18, 20, 22, 24, 27, 30, 33, 37, 41, 46, 51, 57} | {20, 40, 60}
    assert {step for step, keys in found.items() if "update_natural" in keys} == own
    assert all(keys >= needed for keys in found.values() if "update_natural" in keys)
    assert {step: keys for step, keys in found.items() if "update_natural" not in keys} == {
        **dict.fromkeys({21, 28, 35, 42, 49, 56}, others),
    }
    assert "feature_rms" in found[30]


@pytest.mark.parametrize(
    ("every", "early"),
    [(20, TIERS["standard"]), ({"light": 20, "standard": 30}, TIERS["light"]), ("16, every 20", TIERS["standard"])],
)
def test_a_corrections_early_steps_have_what_has_its_interval(every, early):
    probe = trained(every, "standard", 8, mode="correct", correction=LRCorrection("target"))
    assert {m.step: set(m.values) for m in probe.measurements} == {step: set(early) for step in range(1, 9)}


def test_a_correction_is_not_moved_by_what_lacks_a_part():
    correction = {"mode": "correct", "correction": LRCorrection("target")}
    probe = trained({"update_natural": 20, "light": 7}, ["update_natural"], 40, **correction)
    plain = trained(20, LRCorrection("target").quantities, 40, **correction)
    assert probe.multipliers == plain.multipliers
    assert len(set(probe.multipliers.values())) > 1, "there was something to correct"


@pytest.mark.parametrize(
    "entry", [SpectralMonitor, SpectralProbe, SpectralCallback, Settings], ids=lambda e: e.__name__
)
def test_there_is_one_default_schedule(entry):
    defaults = signature(entry).parameters
    assert defaults["every_n_steps"].default == DEFAULT_SCHEDULE
    assert defaults["max_overhead"].default == "auto", "so that the rest of a run costs 1 % at most"
