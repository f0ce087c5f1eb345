"""What policies want, against closed forms."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from spectral_monitor import LayerInfo, Measurement
from spectral_monitor.condition.optimizers.hyperparameters import Hyperparameters
from spectral_monitor.correction import LRCorrection
from spectral_monitor.correction.policies import balanced, explained, momentum_share, share, wanted_decrease


def layer(role, fan_in=16, taps=1, fan_out=64):
    """What policies read of a layer."""
    info = LayerInfo("a", role, fan_out, fan_in, (fan_out, fan_in))
    return SimpleNamespace(info=info, layout=SimpleNamespace(taps=taps))


@pytest.mark.parametrize("factor", [0.01, 1.0, 7.0])
def test_balance_is_what_the_layer_in_the_middle_would_have_alone(factor):
    units, multipliers = [0.3 * factor, 2.0 * factor, 0.04 * factor], [0.5, 0.2, 5.0]
    observed = [u * m for u, m in zip(units, multipliers, strict=True)]
    wanted = balanced(observed, multipliers)
    assert wanted == pytest.approx([units[0]] * 3)
    after = [m * w / x for m, w, x in zip(multipliers, wanted, observed, strict=True)]
    assert after[0] == pytest.approx(1)


@pytest.mark.parametrize(
    ("role", "began", "wanted"),
    [
        ("operator", 0.25, 0.5),
        ("operator", 4.0, 2.0),
        ("operator", 400.0, 20.0),
        ("operator", 0.0, math.sqrt(1 / 8)),  # the least that counts
        ("operator", math.nan, 1.0),
        ("readout", 0.25, 1.0),
        ("readout", 1.44, 1.2),
        ("readout", 4.0, math.sqrt(2)),  # the most
        ("readout", math.nan, 1.0),
        ("embedding", 0.027, 0.3),
        ("embedding", 8.0, 2.0),
        ("embedding", 0.0, 0.02 ** (1 / 3)),
        ("vector", 0.0, 0.04),
        ("vector", 0.5, 0.04),
        ("vector", 9.0, 0.04),
        ("vector", math.nan, 0.04),
    ],
)
def test_shares_are_those_of_the_table_in_the_docs(role, began, wanted):
    assert share(layer(role), began) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("optimizer", "family", "momentum", "wanted"),
    [
        ("AdamW", "adam", 0.9, 1.0),
        ("RMSprop", "adam", 0.0, 19 ** (1 / 3)),
        ("AdamW", "adam", 0.5, (19 / 3) ** (1 / 3)),
        ("Lion", "adam", 0.95, (19 / 39) ** (1 / 3)),
        ("SGD", "sgd", 0.9, 0.7),
        ("SGD", "sgd", 0.0, 0.7 * 19 ** (1 / 3)),
        ("SGD", "sgd", 1.0, 0.7 * (19 * 0.001 / 1.999) ** (1 / 3)),  # no more than 0.999 counts
        ("Muon", "muon", 0.95, 1.0),
        ("LARS", "lamb", 0.9, 1.0),
        ("Adadelta", "", 0.0, 19 ** (1 / 3)),
        ("Rocket", "", 0.0, 1.0),
    ],
)
def test_the_longer_momentum_lasts_the_shorter_are_steps(optimizer, family, momentum, wanted):
    settings = Hyperparameters(optimizer=optimizer, family=family, base_momentum=momentum)
    assert momentum_share(settings) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("role", "began", "wanted"),
    [
        ("operator", 0.0, math.sqrt(3 / 8)),
        ("operator", 3.0, math.sqrt(3)),
        ("readout", 0.0, math.sqrt(3)),
        ("readout", 9.0, math.sqrt(6)),
    ],
)
def test_ends_of_the_table_grow_with_the_root_of_taps_as_usual_weights_do(role, began, wanted):
    assert share(layer(role, taps=9), began) == pytest.approx(wanted)


@pytest.mark.parametrize(("fan_in", "taps", "factor"), [(48, 1, 1.0), (768, 1, 2.0), (3, 1, 0.5), (3, 16, 1.0)])
def test_what_reads_the_data_goes_by_the_fourth_root_of_its_inputs(fan_in, taps, factor):
    assert share(layer("operator", fan_in, taps), 4.0, input_rms=1.0) == pytest.approx(2 * factor)
    assert share(layer("operator", fan_in, taps), 4.0) == pytest.approx(2)


@pytest.mark.parametrize(
    ("family", "role", "fans", "taps", "ends"),
    [
        ("adam", "operator", (64, 16), 1, (4, 16)),  # root of the inputs, and all of them
        ("adam", "readout", (10, 16), 9, (12, 144)),
        ("adam", "embedding", (64, 1), 1, (1, 1)),
        ("adam", "vector", (64, 1), 1, (1, 1)),
        ("muon", "operator", (64, 16), 1, (0.8, 1)),  # max(1, 1/2) and 0.2 sqrt(64) / 2
        ("muon", "operator", (16, 64), 1, (2, 3.2)),  # max(1, 2) and 0.2 sqrt(64) 2
        ("muon", "embedding", (64, 1), 1, (math.nan, math.nan)),
        ("sgd", "operator", (64, 16), 1, (math.nan, math.nan)),
    ],
)
def test_sizes_at_a_rate_of_one_are_those_of_the_optimizers_formula(family, role, fans, taps, ends):
    fan_out, fan_in = fans
    assert explained(layer(role, fan_in, taps, fan_out), family) == pytest.approx(ends, nan_ok=True)


@pytest.mark.parametrize(("polyak", "wanted"), [(None, 1.0), (0.0, 0.7), (0.2, 0.5)])
def test_the_decrease_that_is_wanted_is_the_loss_over_its_least_value(polyak, wanted):
    info = LayerInfo("a", "operator", 1, 1, (1, 1))
    assert wanted_decrease(Measurement(1, (info,), {}, {"loss": 0.7}), polyak) == pytest.approx(wanted)


def test_one_layer_far_off_does_not_move_the_others():
    assert balanced([0.1, 0.1, 0.1, 1e6], [1.0] * 4) == pytest.approx([0.1] * 4)


def test_what_was_not_seen_does_not_count():
    assert balanced([0.1, math.nan, 0.4, 0.0, math.inf], [1.0] * 5) == pytest.approx(
        [0.2, math.nan, 0.2, math.nan, math.nan], nan_ok=True
    )
    assert all(map(math.isnan, balanced([0.0, math.nan], [1.0, 1.0])))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"policy": "best"}, "valid policies: target, balance, reference, fsc"),
        ({"policy": LRCorrection()}, "pass its arguments directly"),
        ({"policy": "reference"}, "needs the file of a profile"),
        ({"policy": "target", "reference": "a.json"}, "no other policy takes one"),
        ({"size": 0.0}, 'size must be a positive number or "lr"'),
        ({"size": -0.125}, "got -0.125"),
        ({"size": math.inf}, "size"),
        ({"size": "max"}, "size"),
        ({"size": True}, "size"),
        ({"limits": (2.0, 10.0)}, "limits"),
        ({"limits": (0.0, 10.0)}, "limits"),
        ({"limits": (-0.5, 10.0)}, "limits"),
        ({"limits": (0.5, 0.9)}, "limits"),
        ({"limits": (0.5, 1e999)}, "limits"),
        ({"limits": (0.1,)}, "limits"),
        ({"limits": ("a", "b")}, "limits must be two positive numbers around 1"),
        ({"limits": (True, 2.0)}, "limits must be two positive numbers around 1"),
        *(
            ({"qk_clip": clip}, "qk_clip must be a positive number or None")
            for clip in (0.0, -1.0, math.inf, "100", True)
        ),
        ({"spectral_init": -1.0}, "spectral_init"),
        ({"spectral_init": math.inf}, "spectral_init"),
        ({"spectral_init": "yes"}, 'spectral_init must be True, False, "auto" or a natural norm'),
    ],
)
def test_impossible_settings_are_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        LRCorrection(**arguments)


def test_limits_may_be_1():
    assert LRCorrection(limits=(1.0, 1.0)).limits == (1.0, 1.0)


def test_only_what_the_policy_needs_is_measured():
    assert "update_natural" not in LRCorrection("fsc").quantities
    assert "feature_change" not in LRCorrection("target").quantities


def test_a_misspelt_setting_is_named():
    with pytest.raises(TypeError, match=r"did you mean 'size'"):
        LRCorrection("target", siez=0.1)
