"""Every limit that docs/verdicts.md states, from both sides: just inside is healthy, just outside is off."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest

from spectral_monitor.condition import SpectralCondition, save_profile
from spectral_monitor.condition.findings import ROUNDING, findings
from spectral_monitor.condition.network import Network
from spectral_monitor.condition.optimizers.across import MAX_RATE_RATIO
from spectral_monitor.condition.references.width_transfer import THRESHOLD
from spectral_monitor.condition.row import columns
from spectral_monitor.condition.trends.attention import AttentionTrend
from spectral_monitor.condition.trends.decay import DecayTrend
from spectral_monitor.condition.trends.losses import FEW_EDGES
from spectral_monitor.condition.trends.pace import SETTLED
from spectral_monitor.condition.trends.readout import ReadoutTrend
from spectral_monitor.condition.whole_network import WholeNetwork
from tests.condition.synthetic import HEALTHY, LAYERS, heavy, judged, measured, set_by, verdicts_on

PAGE = (Path(__file__).parents[2] / "docs" / "verdicts.md").read_text()
JUST = 2e-5
"""Relative distance from a limit: more than float32 rounds, less than limits are stated to."""


def numbers(text):
    return [float(Fraction(number)) for number in re.findall(r"\d+/\d+|\d+(?:\.\d+)?", text)]


def row_of(check):
    """The cells of a check's row: its name, what is off, and the limit."""
    cells = [line.strip("| ").split(" | ") for line in PAGE.splitlines()]
    return next(found for found in cells if found[0].startswith(f"`{check}`") and len(found) == 3)


def stated(check):
    """The numbers in the limit of a check, in the order of the page."""
    return numbers(row_of(check)[2])


def everywhere(value, *keys):
    return {key: dict.fromkeys(LAYERS, value) for key in keys}


def is_off(check, *changes, start=1, settings=None, condition=None):
    """Whether this check finds anything outside its limits at the last of these measurements."""
    whole, trends = WholeNetwork(), (AttentionTrend(), ReadoutTrend(), DecayTrend())
    for step, change in enumerate(changes, start):
        measurement = measured(step, **change)
        network = Network.read(measurement, columns(measurement), settings)
        found = [
            *findings(network, condition or SpectralCondition()),
            *whole.findings(measurement, network),
            *(finding for trend in trends for finding in trend.findings(measurement, network)),
        ]
    return any(finding.check == check and not finding.inside() for finding in found)


def loss_returns(pace=0.5, last=3.5, losses=(9.0, 1.0), edges=()):
    """A first loss, a lower one and then ``last``, under steps of this part of the weights; some have known edges."""
    losses = [losses[0], *[losses[1]] * 15, last]
    known = [*edges, *[math.nan] * (len(losses) - len(edges))]
    steps = ({"summary": {"loss": x, "edge": edge}} for x, edge in zip(losses, known, strict=True))
    return is_off("loss_returns", *(step | everywhere(pace, "update_ratio") for step in steps))


def lasting_share(share=0.99, count=9, steps=200):
    """A readout's share in so many measurements, from the first to the last of which there are so many steps."""
    trend = ReadoutTrend()
    for step in (1, *range(steps + 3 - count, steps + 2)):  # evenly spaced or not is the same
        measurement = measured(step, summary={"readout_share": share})
        found = list(trend.findings(measurement, Network.read(measurement, columns(measurement))))
    return any(not finding.inside() for finding in found)


def grown_embedding(size):
    """Rows that began at 1 and have grown."""
    judge, _ = judged([measured(step, weight_natural={"tok": x}) for step, x in enumerate((1.0, size), 1)])
    return any(finding.check == "embedding" and not finding.inside() for finding in judge.findings)


def collapsed(entropy=0.01, count=8):
    return is_off("attention_collapsed", *[{"attention_entropy_lowest": {"b": entropy}}] * count)


def decayed(left=0.1, pace=0.1, steps=8, decay=10.0):
    """A weight that loses so much in each of some steps, and then is down to ``left`` at once."""
    sizes = [HEALTHY["weight_fro"] * x for x in (*((1 - pace) ** k for k in range(steps + 1)), left)]
    settings = set_by("AdamW", weight_decay=decay, decoupled=True)  # at a learning rate of 0.01
    return is_off("decay", *({"weight_fro": {"b": size}} for size in sizes), settings=settings)


def updates_of(factor):
    """One layer's update beside those of the others, all relative to weights of entries 1/sqrt(fan_in)."""
    sizes = {name: 0.1 * math.sqrt(info.fan_in) for name, info in LAYERS.items()}
    return is_off("reference", {"update_natural": sizes | {"b": factor * sizes["b"]}})


def adam_share(share, gradients=0.01):
    sizes = {name: share * HEALTHY["lr"] * math.sqrt(info.fan_out * info.fan_in) for name, info in LAYERS.items()}
    change = {"update_fro": sizes, "drift_ratio": dict.fromkeys(LAYERS, 0.01)}
    change["contribution"] = dict.fromkeys(LAYERS, gradients)
    return is_off("eps", change, settings=set_by("AdamW", eps=1e-4))


def rounded(part):
    """An update of this part of the resolution of its weights, which is that of bfloat16."""
    update = {"update_fro": {"b": part * 2.0**-7 * HEALTHY["weight_fro"]}}
    return is_off("rounding", update, settings=set_by("SGD", resolution=2.0**-7))


@pytest.mark.parametrize("lr", [0.0, math.nan])
def test_an_update_that_no_learning_rate_made_is_not_lost_in_rounding(lr):
    update = {"update_fro": {"b": 1e-3 * 2.0**-7 * HEALTHY["weight_fro"]}, "lr": dict.fromkeys(LAYERS, lr)}
    assert not is_off("rounding", update, settings=set_by("SGD", resolution=2.0**-7, lr=update["lr"]))


@pytest.mark.parametrize(("factor", "count"), [(3.5, 0), (4.5, 1)])
def test_an_update_far_below_the_resolution_is_told_at_once(factor, count):
    """Evidence is enough by itself from four times beyond the limit on."""
    update = ROUNDING * 2.0**-7 * HEALTHY["weight_fro"] / factor
    settings = set_by("SGD", resolution=2.0**-7)
    assert len(verdicts_on(1, settings=settings, update_fro={"b": update})) == count


def test_rates_are_too_small_after_four_looks():
    """At the default they are those of steps 1, 2, 4 and so on; here none is before the step from which it is told."""
    slow = everywhere(1e-4, "update_ratio", "update_natural")
    assert [is_off("rates_too_small", *[slow] * looks, start=SETTLED) for looks in (3, 4)] == [False, True]


def test_weights_have_grown_from_ten_times_their_start_on():
    sizes = {"weight_natural": {"b": 200.0}}
    assert [is_off("grown", sizes | {"drift_ratio": {"b": x}}) for x in (9.5, 10.5)] == [False, True]


def seen(check, *changes, settings=None):
    """The values of this check's findings, healthy or not, at measurements with these changes."""
    whole, values = WholeNetwork(), []
    for step, change in changes:
        measurement = measured(step, **change)
        network = Network.read(measurement, columns(measurement), settings)
        values += [finding.value for finding in whole.findings(measurement, network) if finding.check == check]
    return values


def test_targets_are_seen_where_nothing_is_known_of_the_outputs():
    """Without a readout, and with one whose outputs were not measured, their size counts as 1."""
    for layers in (LAYERS, {name: info for name, info in LAYERS.items() if name != "head"}):
        assert seen("targets", (1, {"layers": layers, "summary": {"loss_distance": 70.0}})) == [70.0]


def test_steps_below_the_edge_are_seen_too():
    """Else a verdict on steps beyond it would never be lifted."""
    assert seen("global_lr_too_large", *[(k, {"summary": {"edge": 0.4}}) for k in range(1, 6)]) == [0.4]


def test_gradients_that_have_grown_beyond_eps_lift_its_verdict():
    def moved(share):
        sizes = {n: share * HEALTHY["lr"] * math.sqrt(i.fan_out * i.fan_in) for n, i in LAYERS.items()}
        return {"update_fro": sizes}

    steps = [(1, moved(0.01)), (100, moved(0.005)), (200, moved(0.5))]
    assert seen("eps", *steps, settings=set_by("AdamW", eps=1e-4)) == pytest.approx([0.01, 0.01, 0.5])


ABOVE = [
    ("rates", 0, lambda x: is_off("rate", {"lr": {"b": HEALTHY["lr"] * x}})),
    ("rates", 0, lambda x: is_off("rate", {"lr": {"b": HEALTHY["lr"] / x}})),
    ("updates", 1, updates_of),
    ("weights", 1, lambda x: is_off("weights", heavy(c=x))),
    ("embeddings", 1, grown_embedding),
    ("exploding", 0, lambda x: is_off("exploding", {"update_ratio": {"b": x}})),
    ("exploding", 1, lambda x: is_off("grown", {"weight_natural": {"b": x}, "drift_ratio": {"b": 11.0}})),
    ("diverged", 0, lambda x: is_off("diverged", {"weight_natural": {"b": x}})),
    ("diverged", 0, lambda x: is_off("diverged", {"feature_rms": {"b": x}})),
    ("rates_too_large", 0, lambda x: is_off("rates_too_large", everywhere(x * 8, "drift_ratio"), start=64)),
    (
        "rates_too_large",
        1,
        lambda x: is_off("features_grow", everywhere(1.0, "feature_rms"), {"feature_rms": {"b": x}}, start=8),
    ),
    ("global_lr_too_large", 0, lambda x: is_off("global_lr_too_large", *[{"summary": {"edge": x}}] * 5)),
    ("features", 1, lambda x: is_off("features", {"feature_rms": {"b": x}})),
    ("targets", 0, lambda x: is_off("targets", {"summary": {"loss_distance": x}})),
    (
        "logits_exploding",
        0,
        lambda x: is_off("logits_exploding", *({"attention_logit_max": {"b": y}} for y in (1.0, x))),
    ),
    ("readout_takes_all", 0, lasting_share),
]
"""Check, which of its numbers, and whether a value above that number is off."""
BELOW = [
    ("updates", 0, updates_of),
    ("weights", 0, lambda x: is_off("weights", heavy(c=x))),
    ("embeddings", 0, lambda x: is_off("embedding", {"weight_natural": {"tok": x}})),
    ("rounding", 0, rounded),
    (
        "rates_too_small",
        0,
        lambda x: is_off("rates_too_small", *[everywhere(x, "update_ratio", "update_natural")] * 16),
    ),
    ("features", 0, lambda x: is_off("features_vanish", {"feature_rms": {"b": x}})),
    ("eps", 0, adam_share),
    ("eps", 1, partial(adam_share, gradients=1e-9)),
    ("attention_collapsed", 0, collapsed),
    ("decay", 0, decayed),
]
"""Check, which of its numbers, and whether a value below that number is off."""


@pytest.mark.parametrize(("check", "place", "off"), ABOVE)
def test_what_is_above_its_limit_is_off_and_what_is_below_is_not(check, place, off):
    limit = stated(check)[place]
    assert not off(limit * (1 - JUST))
    assert off(limit * (1 + JUST))


@pytest.mark.parametrize(("check", "place", "off"), BELOW)
def test_what_is_below_its_limit_is_off_and_what_is_above_is_not(check, place, off):
    limit = stated(check)[place]
    assert not off(limit * (1 + JUST))
    assert off(limit * (1 - JUST))


def test_a_momentum_of_its_limit_is_off():
    (limit,) = stated("momentum")
    below, at = (is_off("momentum", {}, settings=set_by("SGD", momentum=x)) for x in (limit * (1 - JUST), limit))
    assert (below, at) == (False, True)


def test_a_loss_is_held_against_the_first_and_the_lowest_in_networks_that_race():
    line = next(line for line in PAGE.splitlines() if "the same, with the loss" in line)
    racing, back, first = numbers(line.rpartition(" | ")[2])
    assert back == numbers(line.rpartition(" | ")[0])[0], "as the sentence has it"
    assert not loss_returns(pace=racing * (1 - JUST))
    assert loss_returns(pace=racing * (1 + JUST))
    assert not loss_returns(last=back * (1 - JUST))  # of 1
    assert loss_returns(last=back * (1 + JUST))
    of_first = 9.0 / 4
    assert not loss_returns(last=of_first * (1 - JUST), losses=(9.0, 0.1))
    assert not loss_returns(edges=[1 - JUST] * FEW_EDGES), "steps are not too long"
    assert loss_returns(edges=[1 + JUST] * FEW_EDGES)
    assert loss_returns(edges=[1 - JUST] * (FEW_EDGES - 1))
    assert loss_returns(last=of_first * (1 + JUST), losses=(9.0, 0.1))
    assert not loss_returns(losses=(9.0, -1.0)), "a loss below 0 has no factors"
    assert not loss_returns(last=first * 2 * (1 - JUST), losses=(2.0, 1.5))
    assert loss_returns(last=first * 2 * (1 + JUST), losses=(2.0, 1.5))


def test_what_steps_promise_is_held_against_the_loss():
    line = next(line for line in PAGE.splitlines() if "the same, with its gradients" in line)
    (count,), (most,) = numbers(line.rpartition(" | ")[0])[:1], numbers(line.rpartition(" | ")[2])

    def promises(part, count=int(count)):
        return is_off("beyond_loss", *[{"summary": {"loss": 2.0, "loss_change_predicted": -2.0 * part}}] * count)

    assert not promises(most * (1 - JUST))
    assert promises(most * (1 + JUST))
    assert not promises(most * 9, count=int(count) - 1)


def test_what_must_last_has_lasted_for_as_many_measurements_and_steps_as_stated():
    count, steps = numbers(row_of("readout_takes_all")[1])
    assert lasting_share(count=int(count), steps=int(steps))
    assert not lasting_share(count=int(count) - 1, steps=int(steps))
    assert not lasting_share(count=int(count), steps=int(steps) - 1)
    (count,) = numbers(row_of("attention_collapsed")[1])
    assert collapsed(count=int(count))
    assert not collapsed(count=int(count) - 1)


def test_decay_is_to_blame_for_what_goes_as_fast_and_as_long_as_stated_and_is_its_own():
    percent, steps = numbers(row_of("decay")[1])  # a third and most are in words
    pace, steps = percent / 100, int(steps)
    assert decayed(pace=pace * 1.01, steps=steps)
    assert not decayed(pace=pace * 0.98, steps=steps)
    assert not decayed(pace=0.1, steps=steps - 2), "the last one goes down to what is left"
    third = -math.log(1 - 0.1) / 3 / HEALTHY["lr"]
    assert decayed(pace=0.1, decay=third * 1.01)
    assert not decayed(pace=0.1, decay=third * 0.99)


def test_the_edge_is_the_median_of_as_many_measurements_as_stated():
    edge = {"summary": {"edge": 9.0}}
    assert "last five measurements" in row_of("global_lr_too_large")[1]
    assert is_off("global_lr_too_large", *[edge] * 5)
    assert not is_off("global_lr_too_large", *[edge] * 4)
    few = [{"summary": {"edge": 0.1}}] * 3
    assert not is_off("global_lr_too_large", *[edge] * 9, *few)
    assert is_off("global_lr_too_large", *few, *[edge] * 3)


def test_numbers_that_other_tests_hold_are_those_of_the_page():
    """Rates of several optimizers (test_cut_off.py) and wider networks (test_width.py)."""
    assert stated("width") == [THRESHOLD]
    assert (
        numbers(PAGE.partition("have rates of one order. Where they are\n")[2].partition(" times apart")[0])[-1]
        == MAX_RATE_RATIO
    )


@pytest.mark.parametrize("reference", ['`"balance"`', '`"theory"`', "a file"])
def test_the_band_of_a_reference_is_the_one_on_the_page(reference, tmp_path):
    save_profile([measured(1)], tmp_path / "good.json")
    condition = SpectralCondition(tmp_path / "good.json" if reference == "a file" else reference.strip('`"'))
    line = next(line for line in PAGE.splitlines() if line.startswith(f"| {reference}"))
    assert list(condition.limits) == numbers(line.rpartition(" | ")[2])


def test_a_weight_is_held_against_the_theory_from_both_sides():
    condition = SpectralCondition("theory")
    low, high = condition.limits
    for size, off in (
        (low * (1 - JUST), True),
        (low * (1 + JUST), False),
        (high * (1 - JUST), False),
        (high * (1 + JUST), True),
    ):
        assert is_off("reference", {"weight_natural": {"b": size}}, condition=condition) == off


def test_a_loss_below_zero_is_held_against_its_first_ones():
    line = next(line for line in PAGE.splitlines() if "a loss below 0 that falls without end" in line)
    (limit,) = numbers(line.rpartition(" | ")[2])

    def falls(part, first=2.0, between=(-3.0, -4.0, -5.0)):
        return is_off("endless", *({"summary": {"loss": x}} for x in (first, *between, -part * 2.0)), start=8)

    assert not falls(limit * (1 - JUST))
    assert falls(limit * (1 + JUST))
    assert not falls(limit * (1 + JUST), between=(-3.0, -5.0, -4.0)), "not lower than ever"
