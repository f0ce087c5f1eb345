"""Wider than the profile: growth in closed form, evidence that adds up, rates that were divided already."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import pytest
import torch
from torch import nn

from spectral_monitor import LayerInfo, Measurement, SpectralProbe
from spectral_monitor.condition.optimizers.hyperparameters import Hyperparameters, hyperparameters
from spectral_monitor.condition.references import width_transfer
from spectral_monitor.condition.references.profile import Fans, Profile, ProfilePoint, load_profile, save_profile
from spectral_monitor.condition.references.width_transfer import THRESHOLD, WINDOW, compare_widths, find_width
from tests.one_step import training_step

ADAM = Hyperparameters(optimizer="Adam", family="adam", peak=0.001)
SGD = Hyperparameters(optimizer="SGD", family="sgd", peak=0.4)
ROLES = {"tok": "embedding", "in": "operator", "a": "operator", "b": "operator", "head": "readout"}
FANS = {"tok": Fans(1, 16), "in": Fans(64, 16), "a": Fans(16, 16), "b": Fans(16, 64), "head": Fans(64, 10)}
GROWN = ("a", "b", "head")


def profile(fans=FANS, steps=(1, 128), lr=0.001):
    points = dict.fromkeys(ROLES, tuple(ProfilePoint(1.0, 0.1, lr) for _ in steps))
    return Profile(ROLES, dict.fromkeys(ROLES, steps), points, fans)


def wide(step=1, *, factor=8, update=None, lr=None, fans=FANS):
    """A measurement of a network whose hidden layers are so many times wider; ``update``, ``lr``: layer -> times."""
    growth = {"tok": (1, factor), "in": (1, factor), "a": (factor,) * 2, "b": (factor,) * 2, "head": (factor, 1)}
    infos = [
        LayerInfo(name, ROLES[name], fans[name].fan_out * m, fans[name].fan_in * n, (fans[name].fan_out * m, n))
        for name, (n, m) in growth.items()
    ]
    infos = [replace(info, shape=(info.fan_out, info.fan_in)) for info in infos]
    values = {
        "update_natural": torch.tensor([0.1 * (update or {}).get(name, 1.0) for name in ROLES], dtype=torch.float64),
        "lr": torch.tensor([0.001 * (lr or {}).get(name, 1.0) for name in ROLES], dtype=torch.float64),
    }
    return Measurement(step, tuple(infos), values, {})


def settings(of):
    return dict.fromkeys(ROLES, of)


def grown(times):
    return dict.fromkeys(GROWN, times)


def found(ratios, of=ADAM, **options):
    """The finding on measurements whose grown layers' updates are so many times the profile's."""
    measurements = [wide(s, update=grown(r), **options) for s, r in enumerate(ratios, start=1)]
    return find_width([compare_widths(profile(), m, settings(of)) for m in measurements])


def test_the_network_is_judged_by_the_median_of_layers_whose_inputs_grew():
    update = {"tok": 100.0, "in": 100.0, "a": 2.0, "b": 3.0, "head": 50.0}
    comparison = compare_widths(profile(), wide(update=update), settings(SGD))
    assert comparison.grown == pytest.approx(grown(8.0))
    assert comparison.ratio == pytest.approx(3.0)
    assert comparison.divisor == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("of", "rate", "ratio", "divisor"),
    [
        (ADAM, 1.0, 5.5, 8.0),  # the law, not what alignment left of it
        (ADAM, 0.5, 3.0, 4.0),
        (ADAM, 3.0, 20.0, 24.0),
        (SGD, 1.0, math.sqrt(8), math.sqrt(8)),
        (replace(ADAM, family="muon"), 1.0, 2.5, 2.5),
        (Hyperparameters(), 1.0, 2.5, 2.5),
    ],
)
def test_the_divisor_follows_from_the_family_the_fans_and_the_rates(of, rate, ratio, divisor):
    finding = found([ratio] * 5, of, lr=dict.fromkeys(ROLES, rate))
    assert finding.divisor == pytest.approx(divisor)
    assert (finding.width, finding.rate, finding.ratio) == pytest.approx((8.0, rate, ratio))
    assert finding.measurements == 5


def test_adam_at_a_rate_that_was_divided_already_is_right_whatever_updates_do():
    assert found([3.0] * 8, lr=dict.fromkeys(ROLES, 1 / 8)) is None
    assert found([3.0] * 8, SGD, lr=dict.fromkeys(ROLES, 1 / 8)) is not None


def test_rates_that_only_the_grown_layers_divide_are_right_too():
    """As muP has them."""
    assert found([2.0] * 8, lr=grown(1 / 8)) is None


def test_layers_of_several_families_are_each_held_against_their_own_law():
    mixed = {"a": SGD, "b": ADAM, "head": SGD}
    comparison = compare_widths(profile(), wide(update={"a": 3.0, "b": 2.0, "head": 5.0}), mixed)
    assert comparison.divisor == pytest.approx(5.0)  # of 3, 8 and 5
    assert (comparison.optimizer, comparison.family) == ("", "")
    assert math.isnan(comparison.lr)


@pytest.mark.parametrize(("ratio", "needed"), [(8.0, 1), (3.95, 1), (3.85, 2), (2.3, 2), (2.2, 3), (1.7, 5), (1.55, 7)])
def test_evidence_adds_up(ratio, needed):
    """Measurements times log(ratio / 1.3) reach log 3."""
    assert needed == math.ceil(math.log(3) / math.log(ratio / 1.3))
    counts = [n for n in range(1, WINDOW + 1) if found([ratio] * n, SGD) is not None]
    assert counts == list(range(needed, WINDOW + 1))


@pytest.mark.parametrize("ratio", [1 / 8, 0.7, 1.0, THRESHOLD, 1.45])
def test_updates_of_the_profiles_size_are_no_finding(ratio):
    assert found([ratio] * 50, SGD) is None
    assert found([ratio] * 50) is None


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [(128.4, 2, "130"), (0.1254, 2, "0.13"), (2_500_000.0, 2, "2.5e+06"), (128.4, 3, "128")],
)
def test_numbers_below_a_million_have_no_exponent(value, digits, text):
    assert width_transfer._digits(value, digits) == text


def test_layers_of_no_optimizer_have_no_name_in_common():
    assert width_transfer._common_name([]) == width_transfer._common_name(["SGD", "Adam"]) == ""
    assert width_transfer._common_name(["SGD", "SGD"]) == "SGD"


def test_a_single_spike_is_no_finding():
    assert found([1.0, 1.0, 1.0, 1.0, 200.0, 1.0], SGD) is None


def test_what_was_put_right_is_forgotten():
    assert found([8.0] * 5 + [1.0] * WINDOW, SGD) is None


def test_without_comparisons_there_is_no_finding():
    assert find_width([]) is None


def test_the_sentence_has_the_numbers_of_the_settings():
    assert found([6.1] * 5).sentence == (
        "layers have 8 times the profile's inputs at the same Adam rate, and their updates are 6.1 times as large: "
        "divide the learning rate by 8 (0.001 -> 0.000125), or use SpectralLRCorrector"
    )
    assert found([3.0] * 5, SGD, lr=dict.fromkeys(ROLES, 0.5)).sentence == (
        "layers have 8 times the profile's inputs at 0.5 times its SGD rate, and their updates are 3 times as large: "
        "divide the learning rate by 3 (0.4 -> 0.133), or use SpectralLRCorrector; if the loss falls, "
        "you may keep the rate"
    )
    assert "divide the learning rate by 3, or" in found([3.0] * 5, Hyperparameters()).sentence
    assert replace(found([6.1] * 5), width=2.54).sentence.startswith("layers have 2.5 times the profile's inputs")


@pytest.mark.parametrize(
    ("held", "measurement"),
    [
        (profile(fans={}), wide(update=grown(8.0))),
        (profile(), wide(factor=1, update=grown(8.0))),  # another fault: nothing is wider
        (profile(steps=(50, 128)), wide(update=grown(8.0))),  # the profile began later
        (profile(), wide(129, update=grown(8.0))),  # and ended sooner
        (profile(), wide(update=grown(math.nan))),
        (profile(), wide(update=grown(math.inf))),
        (profile(), wide(update=grown(0.0))),
        (profile(), wide(lr=dict.fromkeys(ROLES, 0.0))),
        (profile(lr=0.0), wide(update=grown(8.0))),
        (profile(), Measurement(1, wide().layers, {"lr": wide().values["lr"]}, {})),
        (profile(), Measurement(1, wide().layers, {"update_natural": wide().values["lr"]}, {})),
    ],
)
def test_what_cannot_be_compared_is_not(held, measurement):
    assert compare_widths(held, measurement, settings(ADAM)) is None


def test_one_layer_without_a_value_leaves_the_others():
    comparison = compare_widths(profile(), wide(update={"a": math.nan, "b": 4.0, "head": 4.0}), settings(SGD))
    assert set(comparison.grown) == {"b", "head"}
    assert comparison.ratio == pytest.approx(4.0)


def test_taps_count_as_inputs():
    """Three taps in place of one, with as many channels."""
    held = Profile({"c": "operator"}, {"c": (1,)}, {"c": (ProfilePoint(1.0, 0.1, 0.001),)}, {"c": Fans(8, 8, 1)})
    values = {"update_natural": torch.tensor([0.3]), "lr": torch.tensor([0.001])}
    comparison = compare_widths(held, Measurement(1, (LayerInfo("c", "operator", 8, 8, (8, 8, 3)),), values, {}))
    assert comparison.grown == {"c": 3.0}


def test_a_comparison_is_plain_data():
    comparison = compare_widths(profile(), wide(update=grown(8.0)), settings(ADAM))
    assert type(comparison)(**asdict(comparison)) == comparison


@pytest.mark.parametrize(("optimizer", "lr"), [(torch.optim.Adam, 0.001), (torch.optim.SGD, 0.4)])
def test_a_readout_that_begins_at_zero_has_the_growth_of_the_closed_form(tmp_path, optimizer, lr):
    """Inputs of 1 and the same error at any width: ``dW = lr e 1^T``, of natural norm ``lr |e| n / sqrt(m)``."""

    def watched(width):
        head = nn.Sequential(nn.Linear(width, 4, bias=False))
        nn.init.zeros_(head[0].weight)
        given = optimizer(head.parameters(), lr=lr)
        probe = SpectralProbe(head, given, every_n_steps=1, quantities="light", mode="observe")
        for _ in range(2):
            with training_step(probe, given):
                (head(torch.ones(2, width)).sum(1) * torch.tensor([1.0, 2.0])).sum().backward()
        return probe, hyperparameters(probe.anatomy.layers, [given])

    narrow, of_narrow = watched(16)
    save_profile(narrow.measurements, tmp_path / "p.json", of_narrow)
    held = load_profile(tmp_path / "p.json")
    probe, own = watched(128)
    finding = find_width([compare_widths(held, m, own) for m in probe.measurements])
    assert (finding.ratio, finding.divisor, finding.width) == pytest.approx((8.0, 8.0, 8.0), rel=1e-3)
    assert (finding.lr_before, finding.lr_after) == pytest.approx((lr, lr / 8))
    assert finding.optimizer == optimizer.__name__


@pytest.mark.slow
def test_a_wide_perceptron_at_the_narrow_rate_is_named_and_better_off_with_the_advice():
    from benchmarks.recipes.width import TASKS, study

    result = study(next(task for task in TASKS if task.name == "MLP, Adam"), 2, 3)
    assert result.named
    assert result.wide.divisor == pytest.approx(8.0)
    assert result.false == 0
    _, same, advised = result.losses
    assert advised < same
