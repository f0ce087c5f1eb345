"""Networks with an optimizer each, side by side or against each other: the one is named that is off."""

import math
from dataclasses import replace

import pytest

from spectral_monitor import LayerInfo
from spectral_monitor.condition import NETWORK, Judge, SpectralCondition

from .synthetic import measured, set_by

GENERATOR, CRITIC = [f"generator.{k}" for k in range(4)], [f"critic.{k}" for k in range(3)]


def network(count=4):
    """Layers of a generator and of a critic."""
    names = [*GENERATOR[:count], *CRITIC]
    return {name: LayerInfo(name, "operator", 64, 64, (64, 64)) for name in names}


def settings_of(layers, rates=(0.01, 0.01), optimizers=("Adam", "Adam")):
    """Each under an optimizer of its own."""
    found = {}
    for owner, (name, rate) in enumerate(zip(optimizers, rates, strict=True)):
        own = set_by(name, layers=layers, owner=owner, group=owner)
        prefix = ("generator", "critic")[owner]
        found |= {key: replace(own[key], lr=rate, peak=rate) for key in layers if key.startswith(prefix)}
    return found


def roots(steps, settings, layers, summary=None, **changed):
    """The roots after measurements at these steps; ``changed``: quantity -> (generator's, critic's) value."""
    values = {key: {name: pair[name.startswith("critic")] for name in layers} for key, pair in changed.items()}
    judge = Judge(SpectralCondition())
    for step in steps:
        found = judge.judge(measured(step, layers=layers, summary=summary, **values), settings)
    return [verdict for verdict in found if verdict.is_root]


@pytest.mark.parametrize("odd", [0, 1])
def test_the_one_whose_layers_have_come_too_far_is_named(odd):
    """The other one is left alone, by the sentence and by the remedy."""
    layers = network()
    drift, step = [1.0, 1.0], [0.05, 0.05]
    drift[odd], step[odd] = 40.0, 0.6
    (verdict,) = roots(range(1, 4), settings_of(layers), layers, drift_ratio=drift, update_ratio=step)
    names = (GENERATOR, CRITIC)[odd]
    assert (verdict.layer, verdict.cause, list(verdict.remedy.layers)) == (NETWORK, "rates_too_large", names)
    assert f"the optimizer that trains {names[0]} by about 20" in verdict.sentence


@pytest.mark.parametrize("drift", [1.0, 40.0])
def test_what_is_seen_of_one_optimizer_is_of_the_whole_network(drift):
    layers = network()
    settings = {name: replace(setting, owner=0) for name, setting in settings_of(layers).items()}
    judge = Judge(SpectralCondition())
    judge.judge(measured(1, layers=layers, drift_ratio=dict.fromkeys(layers, drift)), settings)
    assert [found.layers for found in judge.findings if found.check == "rates_too_large"] == [()]


def test_where_both_have_come_too_far_every_rate_is_to_change():
    layers = network()
    (verdict,) = roots(range(1, 4), settings_of(layers), layers, drift_ratio=(40, 30), update_ratio=(0.6, 0.6))
    assert verdict.remedy.layers == ()
    assert "divide every learning rate by about 20" in verdict.sentence


def test_few_layers_of_one_do_not_hide_behind_many_of_another():
    """The median of all is healthy. Two layers alone are no network."""
    layers = network()
    settings = settings_of(layers)
    assert roots(range(1, 4), settings, layers, drift_ratio=(1, 40))
    shared = {name: replace(setting, owner=0) for name, setting in settings.items()}
    assert not [v for v in roots(range(1, 4), shared, layers, drift_ratio=(1, 40)) if v.cause == "rates_too_large"]
    two = {name: info for name, info in layers.items() if name != CRITIC[-1]}
    found = roots(range(1, 4), settings_of(two), two, drift_ratio=(1, 40))
    assert "rates_too_large" not in {verdict.cause for verdict in found}


def test_the_slow_one_is_named():
    """By a step of its own size: the fastest layer of the other one does not limit the advice."""
    layers = network()
    settings = settings_of(layers, optimizers=("Adam", "SGD"))
    changed = {"update_ratio": (0.0008, 0.03), "update_natural": (0.0008, 0.1)}
    (verdict,) = roots((1, 2, 4, 8, 16), settings, layers, **changed)
    assert (verdict.cause, list(verdict.remedy.layers)) == ("rates_too_small", GENERATOR)
    assert verdict.remedy.value == pytest.approx(60), "0.05 / 0.0008"
    both = roots((1, 2, 4, 8, 16), settings, layers, update_ratio=(0.0008, 0.0008), update_natural=(0.0008, 0.0008))
    assert [verdict.remedy.layers for verdict in both] == [()]


@pytest.mark.parametrize(
    ("steps", "changed", "cause"),
    [
        (range(1, 4), {"drift_ratio": (40.0, 40.0), "update_ratio": (0.6, 0.6)}, "rates_too_large"),
        ((1, 2, 4, 8, 16), {"update_ratio": (0.0008, 0.0008), "update_natural": (0.0008, 0.0008)}, "rates_too_small"),
    ],
)
def test_advice_is_for_the_only_optimizer_with_layers_that_tell(steps, changed, cause):
    """As where Muon has the hidden matrices, and another one a readout that began at zero and all vectors."""
    layers = network() | {"critic.0": LayerInfo("critic.0", "embedding", 64, 1, (64, 64))}
    layers = {name: info for name, info in layers.items() if name not in CRITIC[1:]}
    (verdict,) = roots(steps, settings_of(layers, optimizers=("Muon", "Adam")), layers, **changed)
    assert (verdict.cause, list(verdict.remedy.layers)) == (cause, GENERATOR)
    assert f"of the optimizer that trains {GENERATOR[0]} by" in verdict.sentence
    alone = set_by("Adam", layers=layers)
    (verdict,) = roots(steps, alone, layers, **changed)
    assert (verdict.cause, verdict.remedy.layers) == (cause, ())


@pytest.mark.parametrize(("natural", "is_told"), [(0.002, True), (0.004, False)])
def test_the_one_that_lags_is_named_though_the_network_is_not_slow(natural, is_told):
    """Their steps are of size 0.0015 or 0.0022, those of the other 0.0387: 25 and 18 times as large."""
    layers = network()
    settings = settings_of(layers, optimizers=("Adam", "SGD"))
    changed = {"update_ratio": (0.0012, 0.03), "update_natural": (natural, 0.05)}
    found = roots((1, 2, 4, 8, 16), settings, layers, **changed)
    assert [list(verdict.remedy.layers) for verdict in found] == [GENERATOR] * is_told


@pytest.mark.parametrize(("several", "loss", "is_told"), [(False, 5.0, True), (True, 5.0, False), (True, 20.0, True)])
def test_losses_of_networks_that_compete_may_stay_where_they_began(several, loss, is_told):
    """Three times the first is too much all the same."""
    layers = network()
    settings = settings_of(layers) if several else set_by("Adam", layers=layers)
    judge = Judge(SpectralCondition())
    for step in range(1, 18):
        values = {"update_ratio": dict.fromkeys(layers, 0.5), "summary": {"loss": 2.0 if step < 16 else loss}}
        found = judge.judge(measured(step, layers=layers, **values), settings)
    assert ("rates_too_large" in {verdict.cause for verdict in found}) == is_told


@pytest.mark.parametrize("several", [False, True])
def test_one_of_several_losses_says_nothing_of_what_all_steps_promise(several):
    layers = network()
    settings = settings_of(layers) if several else set_by("Adam", layers=layers)
    judge = Judge(SpectralCondition())
    for step in range(1, 8):
        found = judge.judge(
            measured(step, layers=layers, summary={"loss": 1.0, "loss_change_predicted": -9.0}), settings
        )
    assert ("rates_too_large" in {verdict.cause for verdict in found}) != several


@pytest.mark.parametrize("count", [3, 4])
@pytest.mark.parametrize(
    ("steps", "cause", "named"), [((0.0005, 0.05), "lr_too_small", GENERATOR), ((0.06, 6.0), "lr_too_large", CRITIC)]
)
def test_of_rates_far_apart_the_one_with_the_unhealthy_step_is_off(count, steps, cause, named):
    """However many layers each has."""
    layers = network(count)
    settings = settings_of(layers, rates=(0.0001, 0.01))
    lr = (0.0001, 0.01)
    found = roots((1,), settings, layers, update_ratio=steps, lr=lr)
    told = [verdict for verdict in found if verdict.cause == cause]
    assert {name for verdict in told for name in verdict.layers} == set(named[: count if named is GENERATOR else 3])
    assert told[0].remedy.value == pytest.approx(lr[named is GENERATOR])


def test_the_largest_steps_of_each_are_part_of_the_state():
    layers = network()
    settings = settings_of(layers, optimizers=("Adam", "SGD"))
    values = {"update_ratio": dict.fromkeys(GENERATOR, 0.0008), "update_natural": dict.fromkeys(GENERATOR, 0.0008)}
    judge, resumed = Judge(SpectralCondition()), Judge(SpectralCondition())
    for step in (1, 2, 4, 8):
        judge.judge(measured(step, layers=layers, **values), settings)
    resumed.load_state_dict(judge.state_dict())
    smaller = {key: {name: x / 2 for name, x in some.items()} for key, some in values.items()}
    last = measured(16, layers=layers, **smaller)
    assert resumed.judge(last, settings) == judge.judge(last, settings) != ()


@pytest.mark.parametrize("slow", ["Adam", "SGD"])
def test_clipping_is_named_only_for_an_optimizer_whose_steps_depend_on_gradients(slow):
    layers, other = network(), "SGD" if slow == "Adam" else "Adam"
    settings = settings_of(layers, optimizers=(slow, other))
    changed = {"update_ratio": (0.0008, 0.03), "update_natural": (0.0008, 0.1), "summary": {"clip_factor": 1e-3}}
    (verdict,) = roots((1, 2, 4, 8, 16), settings, layers, **changed)
    assert verdict.cause == "rates_too_small"
    assert set(verdict.remedy.layers) == set(GENERATOR)
    assert ("clip gradients less" in verdict.sentence) == (slow == "SGD")


@pytest.mark.parametrize("count", [1, 2])
def test_target_networks_are_no_further_optimizer(count):
    """They are in none, and steps that are too small are noticed beside them, under one optimizer or two."""
    layers = network()
    targets = {f"target.{k}": LayerInfo(f"target.{k}", "operator", 64, 64, (64, 64)) for k in range(3)}
    settings = settings_of(layers)
    if count == 1:
        settings = {name: replace(its, owner=0, group=0) for name, its in settings.items()}
    still = dict.fromkeys(targets, math.nan)
    values = dict.fromkeys(("update_natural", "update_ratio", "contribution", "lr", "update_fro"), still)
    judge = Judge(SpectralCondition())
    for step in (1, 2, 4, 8, 16, 32):
        slow = {
            key: {**values.get(key, {}), **dict.fromkeys(layers, 1e-4)} for key in ("update_natural", "update_ratio")
        }
        found = judge.judge(measured(step, layers={**layers, **targets}, **(values | slow)), settings)
    assert [verdict.cause for verdict in found if verdict.is_root] == ["rates_too_small"]


def test_target_networks_that_lag_do_not_hide_steps_that_are_too_large():
    layers = network()
    targets = {f"target.{k}": LayerInfo(f"target.{k}", "operator", 64, 64, (64, 64)) for k in range(9)}
    settings = {name: replace(its, owner=0, group=0) for name, its in settings_of(layers).items()}
    still = dict.fromkeys(targets, math.nan)
    values = dict.fromkeys(("update_natural", "update_ratio", "contribution", "lr", "update_fro"), still)
    drift = {"drift_ratio": dict.fromkeys(layers, 40.0), "update_ratio": dict.fromkeys(layers, 0.6) | still}
    judge = Judge(SpectralCondition())
    for step in (1, 2, 4):
        found = judge.judge(measured(step, layers={**layers, **targets}, **(values | drift)), settings)
    assert "rates_too_large" in {verdict.cause for verdict in found}
