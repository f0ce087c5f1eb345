"""What policies want, against closed forms."""

from __future__ import annotations

import math

import pytest

from spectral_monitor.correction import LRCorrection
from spectral_monitor.correction.policies import balanced


@pytest.mark.parametrize("factor", [0.01, 1.0, 7.0])
def test_balance_is_what_the_layer_in_the_middle_would_have_alone(factor):
    units, multipliers = [0.3 * factor, 2.0 * factor, 0.04 * factor], [0.5, 0.2, 5.0]
    observed = [u * m for u, m in zip(units, multipliers, strict=True)]
    wanted = balanced(observed, multipliers)
    assert wanted == pytest.approx([units[0]] * 3)
    after = [m * w / x for m, w, x in zip(multipliers, wanted, observed, strict=True)]
    assert after[0] == pytest.approx(1)


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
        ({"policy": "reference"}, "needs the file of a profile"),
        ({"policy": "target", "reference": "a.json"}, "no other policy takes one"),
        ({"size": 0.0}, 'size is a positive number or "lr"'),
        ({"size": math.inf}, "size"),
        ({"size": "max"}, "size"),
        ({"size": True}, "size"),
        ({"limits": (2.0, 10.0)}, "limits"),
        ({"limits": (0.0, 10.0)}, "limits"),
        ({"limits": (0.1,)}, "limits"),
        ({"spectral_init": -1.0}, "spectral_init"),
        ({"spectral_init": math.inf}, "spectral_init"),
        ({"spectral_init": "yes"}, 'spectral_init is True, False, "auto" or a natural norm'),
    ],
)
def test_impossible_settings_are_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        LRCorrection(**arguments)


def test_only_what_the_policy_needs_is_measured():
    assert "update_natural" not in LRCorrection("fsc").quantities
    assert "feature_change" not in LRCorrection("target").quantities
