"""Weight decay that takes weights away: told from updates that make them smaller, by settings and by speed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from spectral_monitor import SpectralProbe
from spectral_monitor.condition import Judge, SpectralCondition
from spectral_monitor.condition.trends.decay import DecayTrend
from tests.condition.synthetic import LAYERS, judged, measured, set_by
from tests.one_step import training_step

STEPS = (1, 2, 4, 8, 16, 32, 64)


def shrinking(pace, layers=("a", "b", "c", "head"), steps=STEPS):
    """Measurements of weights that lose this part of their size in each step."""
    return [measured(k, weight_fro=dict.fromkeys(layers, 8.0 * (1 - pace) ** (k - 1))) for k in steps]


def told(measurements, optimizer="AdamW", **fields):
    fields = {"weight_decay": 5.0, "decoupled": optimizer == "AdamW", "group": 0} | fields
    return judged(measurements, settings=set_by(optimizer, **fields))[1]


def test_it_is_told_once_for_a_group_with_what_is_left_and_what_to_set():
    (verdict,) = told(shrinking(0.05))
    assert (verdict.cause, set(verdict.layers)) == ("decay_too_large", {"a", "b", "c", "head"})
    assert verdict.ratio == pytest.approx(0.95**63)
    assert verdict.sentence == (
        "weight decay 5 of AdamW has shrunk its weights to 0.039 of their initial size: use about 0.01, "
        "which removes 1/10000 in a step"
    )
    assert (verdict.remedy.action, verdict.remedy.value) == ("set_weight_decay", 0.01)


@pytest.mark.parametrize(
    ("optimizer", "fields", "value"),
    [
        ("SGD", {"weight_decay": 0.5, "momentum": 0.9}, 0.001),  # lr wd / (1 - momentum) = 1e-4
        ("SGD", {"weight_decay": 5.0}, 0.01),
        ("Adam", {"weight_decay": 0.1}, 1e-4),  # whose decay is normalized with the gradient
        ("Adam", {"weight_decay": 5e-4}, 5e-5),  # never more than a tenth of what there is
        ("AdamW", {"peak": 0.1}, 0.001),  # at the rate that the schedule reaches
    ],
)
def test_what_is_advised_takes_a_ten_thousandth_in_a_step(optimizer, fields, value):
    (verdict,) = told(shrinking(0.05), optimizer, **fields)
    assert verdict.remedy.value == pytest.approx(value)
    assert ("adds it to the gradient" in verdict.sentence) == (optimizer == "Adam")
    assert ("gradients must be tiny" in verdict.sentence) == (optimizer == "Adam" and fields["weight_decay"] < 0.1)


@pytest.mark.parametrize(
    ("optimizer", "fields", "taken"),
    [
        ("SGD", {"weight_decay": 10.0}, 0.1),  # lr 0.01
        ("SGD", {"weight_decay": 2.0, "momentum": 0.9}, 0.2),
        ("SGD", {"weight_decay": 200.0}, 2.0),
        ("AdamW", {"weight_decay": 30.0}, 0.3),
        ("Adam", {"weight_decay": 30.0}, None),  # part of a normalized gradient
        ("SGD", {"weight_decay": 200.0, "frozen": True}, None),
    ],
)
@pytest.mark.parametrize("with_norms", [True, False])
def test_decay_that_takes_more_than_a_tenth_in_a_step_is_told_by_the_settings(optimizer, fields, taken, with_norms):
    """At the first step, whatever was measured; a tenth itself is no more than a tenth."""
    still = {"contribution": dict.fromkeys(LAYERS, 0.0)} if fields.get("frozen") else {}
    run = [measured(1, **still, **({} if with_norms else {"weight_fro": {}}))]
    found = [verdict for verdict in told(run, optimizer, **fields) if verdict.cause == "decay_too_large"]
    assert len(found) == (taken is not None and taken > 0.1)
    if found:
        assert "should be" not in str(found[0]), "no learning rate beside advice on decay"
        assert f"removes {100 * taken:.0f} % of its weights in each step: use about" in found[0].sentence
        assert found[0].remedy.action == "set_weight_decay"


def test_under_a_correction_the_rate_that_counts_is_the_corrected_one():
    every = {"lr": dict.fromkeys(("a", "b", "c", "head"), 0.1), "lr_multiplier": dict.fromkeys(("a", "b", "c"), 10.0)}
    run = [measured(m.step, weight_fro={"b": float(m.value("weight_fro", "b"))}, **every) for m in shrinking(0.05)]
    (verdict,) = told(run, weight_decay=0.5)
    assert verdict.layer == "b"
    assert verdict.remedy.value == pytest.approx(0.001)  # of a rate of 0.1
    assert (
        "decay 0.5 of AdamW, at a learning rate that the correction multiplies by 10, has shrunk its weights"
        in verdict.sentence
    )


@pytest.mark.parametrize(
    ("optimizer", "fields"),
    [
        ("AdamW", {"weight_decay": 0.0}),
        ("AdamW", {"weight_decay": 0.1}),  # which takes 1/1000 in a step, not 5 %
        ("SGD", {"weight_decay": 0.1}),
        ("SGD", {"weight_decay": 0.01, "momentum": 0.9}),
    ],
)
def test_what_decay_cannot_have_done_is_not_blamed_on_it(optimizer, fields):
    assert not told(shrinking(0.05), optimizer, **fields)


def test_weights_that_shrink_as_far_in_a_long_run_are_healthy():
    """A hundred times as slowly, at a decay that explains it."""
    steps = (*STEPS, *range(100, 6400, 100))
    assert not told(shrinking(0.0005, steps=steps), weight_decay=0.05)
    assert not told(shrinking(0.0005, steps=steps), "Adam", weight_decay=0.05)


def test_a_weight_that_decay_can_take_is_told_and_one_that_was_zero_is_not():
    gone = [measured(1), *(measured(k, weight_fro={"b": 0.0}) for k in STEPS[1:])]
    assert not told(gone, weight_decay=9.0), "decay that takes 9 % in a step has not done that"
    assert len(told(gone, weight_decay=50.0)) == 1
    zero = [measured(k, weight_fro={"b": 0.0 if k < 32 else 1.0}) for k in STEPS]
    assert not told(zero, weight_decay=9.0)


def test_under_adam_most_weights_must_go_for_decay_to_be_blamed():
    """One that the loss hardly depends on loses its size by itself, and does no harm."""
    adam = {"weight_decay": 0.1}
    assert not told(shrinking(0.05, ("b",)), "Adam", **adam)
    assert not told(shrinking(0.05, ("b", "c")), "Adam", **adam), "of five"
    assert told(shrinking(0.05, ("b", "c", "head")), "Adam", **adam)
    assert told(shrinking(0.05, ("b",))), "a decay of its own is known"


@pytest.mark.parametrize(("slow", "blamed"), [(0.0065, False), (0.0075, True)])
def test_under_adam_larger_entries_take_longer_to_go(slow, blamed):
    """Adam takes the learning rate from every entry, whatever its size: of five matrices, two have lost a half."""
    steps = [1, 9, 17, 25, 33, 41]
    paces = {"b": 0.05, "c": 0.05, "head": slow}
    sizes = [{name: 8.0 * (1 - pace) ** (step - 1) for name, pace in paces.items()} for step in steps]
    verdicts = told(
        [measured(k, weight_fro=fro) for k, fro in zip(steps, sizes, strict=True)], "Adam", weight_decay=0.1
    )
    assert [set(verdict.layers) for verdict in verdicts] == [{"b", "c"}] * blamed


def test_embeddings_count_too_and_what_is_not_measured_says_nothing():
    (verdict,) = told(shrinking(0.05, ("tok",)))
    assert verdict.layer == "tok"
    pace, step = shrinking(0.05), ("update_natural", "lr")
    bare = [measured(m.step, only=step) for m in pace]
    assert not told(bare)


@pytest.mark.parametrize("at", range(1, len(STEPS)))
def test_a_judge_goes_on_where_another_stopped(at):
    settings, run = set_by(weight_decay=5.0, decoupled=True, group=0), shrinking(0.03)
    first = Judge(SpectralCondition())
    for measurement in run[:at]:
        first.judge(measurement, settings)
    second = Judge(SpectralCondition())
    second.load_state_dict(first.state_dict())
    for measurement in run[at:]:
        assert second.judge(measurement, settings) == first.judge(measurement, settings)
    assert [verdict.cause for verdict in second.judge(run[-1], settings)] == ["decay_too_large"]


def test_a_state_of_before_decay_was_looked_at_is_a_fresh_one():
    trend = DecayTrend()
    trend.load_state_dict({})
    assert trend.state_dict() == DecayTrend().state_dict()


def trained(kind, decay, steps=150, bias=0.0):
    """The causes of a run, the first remedy, and the loss at its end beside the variance of the targets.

    ``bias``: of the second layer.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))
    nn.init.constant_(model[2].bias, bias)
    data = torch.Generator().manual_seed(1)
    optimizer = kind(model.parameters(), lr=3e-3, weight_decay=decay)
    probe = SpectralProbe(model, optimizer, every_n_steps="1, 2, 4, ..., every 50", mode="observe", quantities="light")
    found = {}
    for _ in range(steps):
        x = torch.randn(64, 16, generator=data)
        y = x[:, :1] * x[:, 1:2] + x[:, 2:3].sin()
        with training_step(probe, optimizer):
            loss = (model(x) - y).square().mean()
            loss.backward()
        for verdict in probe.latest.roots:
            found.setdefault(verdict.cause, verdict.remedy)
    return found, loss.item() / y.var().item()


@pytest.mark.parametrize(("kind", "decay"), [(torch.optim.AdamW, 100.0), (torch.optim.Adam, 1.0)])
def test_it_is_found_in_a_run_and_the_advice_saves_it(kind, decay):
    found, lost = trained(kind, decay)
    assert list(found) == ["decay_too_large"]
    mended, loss = trained(kind, found["decay_too_large"].value)
    assert not mended
    assert lost > 0.8 > 0.2 > loss
    assert not math.isnan(lost)


def test_a_learning_rate_that_has_become_zero_is_no_hindrance():
    run = shrinking(0.05, steps=(*STEPS, 65, 66))
    last = [measured(m.step, weight_fro={"b": 0.1}, lr=dict.fromkeys(LAYERS, 0.0)) for m in run[-2:]]
    (verdict,) = told([*shrinking(0.05, ("b",)), *last], lr=dict.fromkeys(LAYERS, 0.0), peak=0.01)
    assert verdict.remedy.value == pytest.approx(0.01)
    every, unknown = dict.fromkeys(LAYERS, math.nan), {"lr": dict.fromkeys(LAYERS, math.nan)}
    sizes = [dict.fromkeys(("a", "b", "c", "head"), 8.0 * 0.95**step) for step in STEPS]
    run = [measured(step, weight_fro=size, **unknown) for step, size in zip(STEPS, sizes, strict=True)]
    (verdict,) = told(run, lr=every, peak=math.nan)
    assert verdict.remedy.value == pytest.approx(0.5), "a tenth, where no rate is known"


@pytest.mark.slow
@pytest.mark.parametrize(("decay", "blamed"), [(1e-5, False), (0.1, True)])
def test_a_penalty_in_the_loss_is_not_the_decay_of_adam(decay, blamed):
    """Which is so much smaller than the gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=decay)
    probe, causes = SpectralProbe(model, optimizer, every_n_steps=1, mode="observe", quantities="light"), set()
    for _ in range(100):
        x = torch.randn(64, 16)
        with training_step(probe, optimizer):
            penalty = sum(p.square().sum() for p in model.parameters())
            ((model(x) - x[:, :1]).square().mean() + (0.0 if blamed else 0.03) * penalty).backward()
        causes |= {v.cause for v in probe.latest.roots}
    first = probe.measurements[0].value("weight_fro", "2")
    assert probe.latest.value("weight_fro", "2") < 0.5 * first
    assert ("decay_too_large" in causes) == blamed


@pytest.mark.parametrize("bias", [0.0, -10.0])
def test_weights_that_shrink_without_any_gradient_are_dead(bias):
    """Adam's steps are as long without gradients, because it divides the decay by its own size."""
    found, _ = trained(torch.optim.Adam, 1.0, bias=bias)
    assert next(iter(found)) == ("dead" if bias else "decay_too_large")
    assert ("decay_too_large" in found) == (bias == 0)


@pytest.mark.parametrize(("clip_factor", "blamed"), [(1.0, False), (1e-2, True)])
def test_under_adam_decay_is_compared_with_clipped_gradients(clip_factor, blamed):
    """Adam divides by the size of its gradients, so clipping leaves steps as they are, but not next to decay."""
    summary, small = {"clip_factor": clip_factor}, {"contribution": dict.fromkeys(LAYERS, 1.0)}
    sizes = [(step, dict.fromkeys(("a", "b", "c", "head"), 8.0 * 0.95 ** (step - 1))) for step in STEPS]
    update = {"update_fro": dict.fromkeys(LAYERS, 1.0)}
    steps = [measured(step, weight_fro=fro, summary=summary, **small, **update) for step, fro in sizes]
    verdicts = told(steps, "Adam", weight_decay=0.01)
    assert [verdict.cause for verdict in verdicts] == ["decay_too_large"] * blamed
    if blamed:
        assert verdicts[0].sentence.endswith(
            "clipping makes gradients 100 times smaller, so clip less, or use AdamW with 0.01"
        )
        assert verdicts[0].remedy.action == "check"
