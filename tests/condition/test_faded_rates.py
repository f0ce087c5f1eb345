"""Schedules that end long before training does."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, CosineAnnealingWarmRestarts, LambdaLR, MultiStepLR, OneCycleLR

from spectral_monitor import SpectralProbe
from spectral_monitor.condition import Judge, SpectralCondition
from tests.condition.synthetic import LAYERS, measured, set_by, verdicts_on
from tests.one_step import training_step


def told(schedule, steps=128, momentum=0.9):
    """The step at which it is first said, and how; nothing if it never is."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    scheduler = schedule(optimizer)
    probe = SpectralProbe(model, optimizer, every_n_steps=4, mode="observe")
    for step in range(1, steps + 1):
        x = torch.randn(32, 16)
        with training_step(probe, optimizer):
            nn.functional.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
        scheduler.step()
        said = [verdict.sentence for verdict in probe.verdicts if "ends too early" in verdict.sentence]
        if said:
            return step, said[0]
    return None


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_updates_that_are_lost_at_the_end_of_a_schedule_are_no_other_fault(optimizer):
    """Without the schedule the same rate is told, for it was set."""

    def said(schedule, lr):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
        made = optimizer(model.parameters(), lr=lr)
        scheduler = MultiStepLR(made, [8, 12, 16], 1e-4) if schedule else None
        probe = SpectralProbe(model, made, every_n_steps=4, mode="observe")
        for _ in range(40):
            x = torch.randn(32, 16)
            with training_step(probe, made):
                nn.functional.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
            if scheduler is not None:
                scheduler.step()
        return [verdict.cause for verdict in probe.verdicts]

    assert said(True, 0.01) == ["schedule_too_short"]
    assert said(False, 1e-14)[0] in ("nothing_trains", "rounding")


def test_steps_that_were_meant_for_epochs():
    step, sentence = told(lambda optimizer: MultiStepLR(optimizer, [5, 10, 15], 0.1))
    assert step == 32
    assert sentence == (
        "the learning rate has fallen from 0.05 to 5e-05 by step 16, and training goes on: its schedule ends too "
        "early, as when a scheduler meant for epochs is stepped after each batch"
    )


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: MultiStepLR(optimizer, [64, 96], 0.1),
        lambda optimizer: CosineAnnealingLR(optimizer, 128),
        lambda optimizer: CosineAnnealingWarmRestarts(optimizer, 16),
        lambda optimizer: OneCycleLR(optimizer, 0.05, 128),
        lambda optimizer: LambdaLR(optimizer, lambda step: max(0.01, 1 - step / 32)),
        lambda optimizer: LambdaLR(optimizer, lambda step: (step + 1) ** -0.5),
        lambda optimizer: LambdaLR(optimizer, lambda step: min(1.0, 1e-4 * 2**step)),
    ],
    ids=["steps", "cosine", "restarts", "one cycle", "long tail", "inverse root", "warm-up"],
)
def test_usual_schedules(schedule):
    assert told(schedule) is None


@pytest.mark.parametrize(("part", "said"), [(1.9e-3, True), (2.1e-3, False)])
def test_a_judge_that_is_resumed_knows_the_highest_rate(part, said):
    judge = Judge(SpectralCondition())
    judge.judge(measured(1), set_by("SGD"))
    for step in (16, 32):
        other = Judge(SpectralCondition())
        other.load_state_dict(json.loads(json.dumps(judge.state_dict())))
        rates = dict.fromkeys(LAYERS, 0.01 * part)
        verdicts = other.judge(measured(step, lr=rates), set_by("SGD", lr=rates))
        judge = other
        assert any("too early" in verdict.sentence for verdict in verdicts) is (said and step == 32)


def test_of_several_warm_ups_the_one_that_comes_farthest_is_told():
    settings = {name: replace(its, peak=1e-4, reached=0.4) for name, its in set_by("Adam").items()}
    settings["head"] = replace(settings["head"], peak=1e-2, reached=0.1)
    (verdict,) = (verdict for verdict in verdicts_on(1, settings=settings) if verdict.cause == "warmup_too_long")
    assert "will only reach 0.0001 by the end of training (0.00025 is set)" in verdict.sentence
