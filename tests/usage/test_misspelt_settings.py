"""Settings that do not exist are refused, with the one that may have been meant."""

from __future__ import annotations

import dataclasses
import inspect
import pickle

import pytest

from spectral_monitor import LRCorrection, SpectralCondition, SpectralLRCorrector, SpectralMonitor

CALLS = {
    "expected": (lambda: SpectralCondition(expect={"head": 10}), "SpectralCondition has no argument 'expect'"),
    "size": (lambda: LRCorrection(sizes=1 / 8), "LRCorrection has no argument 'sizes'"),
    "every_n_steps": (lambda: SpectralMonitor(every=5), "SpectralMonitor has no argument 'every'"),
    "policy": (lambda: SpectralLRCorrector(plicy="fsc"), "SpectralLRCorrector has no argument 'plicy'"),
}


@pytest.mark.parametrize("meant", CALLS)
def test_a_misspelt_argument_is_answered_with_the_right_one(meant):
    call, sentence = CALLS[meant]
    with pytest.raises(TypeError, match=f"{sentence}; did you mean '{meant}'"):
        call()


def test_a_misspelt_check_is_answered_with_the_right_one():
    with pytest.raises(ValueError, match="got 'rate'; did you mean 'rates'"):
        SpectralCondition(ignore=["rate"])


@pytest.mark.parametrize("settings", [SpectralCondition(ignore=["rates"]), LRCorrection(size=0.1)])
def test_settings_are_plain_data_all_the_same(settings):
    assert pickle.loads(pickle.dumps(settings)) == settings == dataclasses.replace(settings)
    fields = [field.name for field in dataclasses.fields(settings) if field.init]
    assert list(inspect.signature(type(settings)).parameters) == fields
