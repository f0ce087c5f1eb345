"""Several monitors of one trainer: those that share nothing each have their own, others are told."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from spectral_monitor import LRCorrection, SpectralLRCorrector, SpectralMonitor
from spectral_monitor.reporting import read_measurements
from tests.callbacks.quickfit import fit, recording
from tests.noninterference import zoo

ONE = r'SpectralMonitor\(mode="correct", correction=LRCorrection\("target"\)\)'


def watching(**settings):
    return SpectralMonitor(every_n_steps=2, mode="observe", **settings)


def correcting(**settings):
    return SpectralLRCorrector("target", every_n_steps=2, **settings)


@pytest.mark.parametrize("first", [False, True], ids=["after", "before"])
def test_a_corrector_beside_a_monitor_is_refused(first):
    pair = [correcting(), watching(quantities="light")]
    logger = recording()
    names = r"SpectralMonitor\(mode='observe'\)|SpectralLRCorrector\(mode='correct'\)"
    with pytest.raises(ValueError, match=rf"({names}) and ({names}) would both log spectral_.*{ONE}"):
        fit(pair[first], logger=logger, callbacks=[pair[not first]])
    assert logger.spectral == []
    assert not any(monitor.measurements for monitor in pair)


@pytest.mark.parametrize("names", [None, ["net.0*"]], ids=["the same layers", "other layers"])
def test_two_correctors_are_refused(names):
    """Of other layers too, for they have the same optimizer."""
    other = SpectralMonitor(mode="correct", correction=LRCorrection("fsc"), include=names)
    both = r"SpectralMonitor\(.* and SpectralLRCorrector\(.* would both correct"
    with pytest.raises(ValueError, match=both):
        fit(correcting(exclude=names), callbacks=[other])


def test_two_that_watch_the_same_are_told_once():
    pair = [watching(), watching(quantities="light")]
    with pytest.warns(UserWarning, match=r"would both log .* an interval for each tier") as caught:
        fit(pair[0], callbacks=[pair[1]])
    assert sum("would both log" in str(warning.message) for warning in caught) == 1
    assert all(len(monitor.measurements) == 3 for monitor in pair)


@pytest.mark.parametrize(
    "pair",
    [
        lambda: (watching(include=["net.0*"]), watching(exclude=["net.0*"])),
        lambda: (watching(include=["net.0*"]), correcting(exclude=["net.0*"])),
        lambda: (watching(quantities=["feature_change"]), correcting()),
    ],
    ids=["layers", "layers, one corrects", "quantities"],
)
def test_those_that_share_nothing_each_have_their_own_file(pair, tmp_path):
    monitors = pair()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*would both log")
        trainer = fit(monitors[1], logger=CSVLogger(tmp_path), callbacks=[monitors[0]])
    names = ("spectral_monitor.jsonl", "spectral_monitor_2.jsonl")
    for monitor, name in zip(monitors, names, strict=True):
        read = list(read_measurements(Path(trainer.logger.log_dir) / name))
        assert [m.step for m in read] == [m.step for m in monitor.measurements]
        for ours, theirs in zip(read, monitor.measurements, strict=True):
            assert ours.layers == theirs.layers
            assert ours.scalars() == pytest.approx(theirs.scalars(), rel=1e-5)


def test_one_for_both_corrects_as_a_corrector_does():
    alone = SpectralLRCorrector("target", every_n_steps=2, spectral_init=2.0)
    rule = LRCorrection("target", spectral_init=2.0)
    both = SpectralMonitor(every_n_steps={"light": 2, "standard": 3}, mode="correct", correction=rule)
    found = []
    for monitor in (alone, both):
        torch.manual_seed(0)
        fit(monitor, zoo.Classifier())
        found.append(monitor.multipliers)
    assert found[0] == found[1]
    assert set(found[0].values()) != {1.0}
    assert "feature_change" in both.latest.values


def test_a_monitor_of_an_earlier_fit_is_none_beside():
    fit(earlier := correcting())
    fit(later := watching(), callbacks=[])
    steps = [m.step for m in later.measurements]
    fit(earlier)
    assert steps == [m.step for m in later.measurements]
    assert set(steps) <= {m.step for m in list(earlier.measurements)[-2 * len(steps) :]}


def test_an_argument_that_a_corrector_has_not():
    with pytest.raises(TypeError, match=r"no argument 'gian'. Valid: policy, every_n_steps, .*, limits"):
        SpectralLRCorrector("target", gian=1)
