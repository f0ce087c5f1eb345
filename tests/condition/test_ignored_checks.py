"""Every check can be turned off by its name, and no other one is turned off by that."""

from __future__ import annotations

import pytest

from spectral_monitor import LayerInfo
from spectral_monitor.condition import Judge, SpectralCondition
from spectral_monitor.condition.settings import CHECKS, NAMED_BY
from tests.condition.synthetic import LAYERS, heavy, measured, nothing, set_by

FAR = {"update_natural": {"b": 10.0}}
HALF = 2.0**-7
"""The resolution of bfloat16."""
BLOCKS = {f"blocks.{k}": LayerInfo(f"blocks.{k}", "operator", 64, 64, (64, 64)) for k in range(4)}
FAULTS = {  # what is found by a check: changes of the measurement, and of all settings
    "rates": ({"lr": {"b": 1.0}}, {}),
    "updates": (FAR, {}),
    "weights": (heavy(b=30.0) | {"drift_ratio": {"b": 0.1}}, {}),
    "embeddings": ({"weight_natural": {"tok": 100.0}}, {}),
    "exploding": ({"update_ratio": {"b": 6.0}}, {}),
    "dead": ({"contribution": {"b": 0.0}}, {}),
    "left_out": (
        {
            "layers": BLOCKS,
            "drift_ratio": {"blocks.1": 0.0},
            **{key: nothing("blocks.1") for key in ("lr", "update_natural", "update_ratio", "contribution")},
        },
        {"layers": {name: info for name, info in BLOCKS.items() if name != "blocks.1"}},
    ),
    "rounding": ({"update_fro": dict.fromkeys(LAYERS, 0.01) | {"b": 1e-4}}, {"resolution": HALF}),
    "diverged": ({"weight_natural": {"tok": float("inf")}}, {}),
    "nothing_trains": ({key: dict.fromkeys(LAYERS, 0.0) for key in ("update_natural", "lr")}, {}),
    "stale_gradients": ({"summary": {"stale_gradient": 1.0}}, {}),
    "rates_too_large": ({"drift_ratio": dict.fromkeys(LAYERS, 9.0)}, {}),
    "global_lr_too_large": ({"summary": {"edge": 4.0}}, {}),
    "rates_too_small": ({key: dict.fromkeys(LAYERS, 1e-5) for key in ("update_natural", "update_ratio")}, {}),
    "features": ({"feature_rms": dict.fromkeys(LAYERS, 1.0) | {"a": 400.0}}, {}),
    "targets": ({"summary": {"loss_distance": 500.0}}, {}),
    "eps": ({"update_fro": dict.fromkeys(LAYERS, 1e-4)}, {"eps": 0.1}),
    "momentum": ({}, {"momentum": 0.999}),
    "logits_exploding": ([{"attention_logit_max": {"b": logit}} for logit in (5.0, 20.0, 70.0, 200.0, 500.0)], {}),
    "attention_collapsed": ([{"attention_entropy_lowest": {"b": 0.01}}] * 8, {}),
    "readout_takes_all": ({"summary": {"readout_share": 0.99}}, {}),
    "decay": ([{"weight_fro": {"b": 8.0 * 0.9**k}} for k in range(16)], {"weight_decay": 9.0, "decoupled": True}),
    "schedule": ({}, {"reached": 0.1}),
    "modes": ({"summary": {"eval_share": 1.0, "dropout_largest": 0.9}}, {}),
    "loss": ({"summary": {"unfit_loss_input": 1.0}}, {}),
}


def checks_of(named, ignore=()):
    """Checks whose evidence the planted fault of one check has made, by the names that users know."""
    changed, fields = FAULTS[named]
    judge = Judge(SpectralCondition(ignore=ignore))
    step = 16 if named == "rates_too_small" else 1
    for some in changed if isinstance(changed, list) else [changed] * 8:
        judge.judge(measured(step, **some), set_by("Adam", **fields))
        step += 20 if named == "readout_takes_all" else 1
    return {NAMED_BY.get(check, check) for _, check, record in judge.state_dict()["records"] if record["flagged"]}


@pytest.mark.parametrize("named", FAULTS)
def test_a_check_is_turned_off_by_its_name(named):
    assert named in checks_of(named)
    assert named not in checks_of(named, [named])
    assert checks_of(named, [name for name in CHECKS if name != named]) == {named}, "and no other is"


def test_every_check_can_be_turned_off():
    assert set(FAULTS) | {"width"} == set(CHECKS), "that of width is in the tests of profiles"
    assert set(NAMED_BY.values()) <= set(CHECKS)
