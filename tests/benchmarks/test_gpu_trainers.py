"""What ``make gpu`` does with Lightning's Trainer, as far as a machine without an accelerator shows it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from benchmarks.gpu import trainers
from spectral_monitor import SpectralMonitor

GPU_ALONE = ("capturable", "FSDP over")
ON_CPU = [title for title in trainers.WAYS if not any(word in title for word in GPU_ALONE)]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("title", ON_CPU)
def test_training_is_the_same_and_norms_are_those_of_an_svd(title):
    one = trainers.tried("cpu", [title])[title]
    assert not one.error
    assert one.same or not one.repeats
    assert one.numbers > 50
    # A correction measures Frobenius norms alone.
    assert math.isnan(one.norm_error) if trainers.WAYS[title].corrects else one.norm_error < 0.01


class Meddles(SpectralMonitor):
    def on_train_batch_end(self, trainer, module, *args):
        super().on_train_batch_end(trainer, module, *args)
        with torch.no_grad():
            next(module.parameters()).mul_(1.001)


@pytest.mark.slow
def test_training_that_is_changed_is_noticed(monkeypatch):
    monkeypatch.setattr(trainers.Way, "callback", lambda way: Meddles(every_n_steps=1, verbose=False))
    one = trainers.outcome(trainers.WAYS[trainers.PLAIN], "cpu")
    assert not one.same
    assert one.repeats
    assert trainers.rows({"x": one})[0][:2] == ["x", "**differ**"]


def test_a_wrong_norm_is_noticed(monkeypatch):
    original = trainers.weights
    monkeypatch.setattr(trainers, "weights", lambda model: {name: 2 * W for name, W in original(model).items()})
    assert trainers.outcome(trainers.WAYS[trainers.PLAIN], "cpu").norm_error == pytest.approx(0.5, abs=0.01)


def test_a_way_that_fails_stops_no_other():
    title = "AdamW with `capturable=True`"
    found = trainers.tried("cpu", [title, trainers.PLAIN])
    assert "capturable" in found[title].error
    assert found[trainers.PLAIN].numbers
    first, second = trainers.rows(found)
    assert first[1].startswith("**fails**: AssertionError")
    assert second[1] == "the same"


def test_numbers_that_are_not_defined_are_not_missed():
    plain = trainers.Outcome(True, True, 9, {("alignment", "tok"): "one-hot"}, 0.001)
    more = replace(plain, missing={**plain.missing, ("bfa", "head"): "rounding"}, same=False, repeats=False)
    assert trainers.rows({trainers.PLAIN: plain, "other": more}) == [
        [trainers.PLAIN, "the same", "1.0e-03", "9"],
        ["other", "differ, as without it", "1.0e-03", "9, 1 NaN: rounding"],
    ]


@pytest.mark.slow
@pytest.mark.parametrize("title", ["bf16-mixed", "`replay_samples=None`, bf16-mixed"])
def test_half_precision_hides_nothing(title):
    """In spite of dropout."""
    one = trainers.outcome(trainers.WAYS[title], "cpu")
    assert not any(key == "bfa" for key, _ in one.missing)
