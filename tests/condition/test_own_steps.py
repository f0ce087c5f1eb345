"""Optimizers that size every entry's steps by themselves: their learning rates explain nothing after the first step."""

from __future__ import annotations

import pytest

from spectral_monitor.condition import NETWORK
from spectral_monitor.condition.optimizers.hyperparameters import family
from spectral_monitor.measurement import NOT_JUDGED
from tests.condition.synthetic import LAYERS, judged, measured, set_by

FAR = {
    "steps": {"update_natural": {"b": 10.0}},
    "rates": {"lr": {"b": 1.0}},
    "drift": {"drift_ratio": dict.fromkeys(LAYERS, 90.0)},
    "slow": {key: dict.fromkeys(LAYERS, 1e-5) for key in ("update_natural", "update_ratio")},
    "exploding": {"update_ratio": {"b": 6.0}},
    "grown": {"weight_natural": {"b": 300.0}, "drift_ratio": {"b": 20.0}},
    "outputs": {"feature_rms": dict.fromkeys(LAYERS, 1.0) | {"b": 400.0}},
}


def watched(optimizer, change, start=20):
    begin = {"feature_rms": dict.fromkeys(LAYERS, 1.0)} if "feature_rms" in change else change
    first = measured(1, **begin)
    rest = [measured(start + k, **change) for k in range(8)]
    return judged([first, *rest], settings=set_by(optimizer, lr=change.get("lr")))


@pytest.mark.parametrize("change", FAR)
def test_the_size_of_their_steps_is_not_judged(change):
    assert watched("Adam", FAR[change])[1], "under Adam it is"
    for optimizer in ("Rprop", "LBFGS"):
        judge, verdicts = watched(optimizer, FAR[change])
        assert not verdicts
        assert judge.states["b"] == (NOT_JUDGED, f"{optimizer} chooses the size of its steps itself")


def test_everything_else_is():
    assert [v.cause for v in watched("Rprop", {"contribution": {"b": 0.0, "b.bias": 0.0}})[1]] == ["dead"]
    assert [v.layer for v in watched("Rprop", {"weight_natural": {"a": float("inf")}})[1]] == [NETWORK]
    assert [v.cause for v in watched("Rprop", {"summary": {"loss_distance": 500.0}}, start=2)[1]] == ["target_scale"]


def test_rmsprop_is_none_of_them():
    assert family(["RMSprop"]) == "adam"
    assert family(["Rprop"]) == ""
    assert watched("RMSprop", FAR["drift"])[1]
