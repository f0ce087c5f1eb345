"""The probe of a plain loop goes on where another one stopped."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from spectral_monitor import LRCorrection, SpectralMonitorWarning, SpectralProbe
from tests.one_step import training_step
from tests.resume.resuming import Loop, measured


class Run(Loop):
    """A model with dropout and batch normalization, its optimizer and its probe."""

    def __init__(self, width=6):
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(5, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, 3)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.probe = SpectralProbe(self.model, self.optimizer, every_n_steps=2, drift_every=2)

    def train(self, steps):
        for step in steps:
            torch.manual_seed(step)
            with training_step(self.probe, self.optimizer):
                self.model(torch.randn(8, 5)).square().mean().backward()
        return self


@pytest.mark.few(2)
@pytest.mark.parametrize("at", [0, 1, 2, 5, 6])
def test_it_measures_the_same(at):
    """Before the first measured step, right after it, and later."""
    whole = measured(Run().train(range(12)).probe)
    state = Run().train(range(at)).state()
    other = Run()
    with torch.no_grad():
        for p in other.model.parameters():
            p.add_(1.0)  # the weights it was built on do not count
    resumed = measured(other.load(state).train(range(at, 12)).probe)
    assert resumed == {step: m for step, m in whole.items() if step > at}
    known = [step for step, m in whole.items() if m[0]["feature_drift"][0] is not None]
    assert known == [2, 6, 10]


def test_the_state_is_that_which_was_loaded():
    state = Run().train(range(5)).state()["probe"]
    other = Run()
    other.probe.load_state_dict(state)
    assert other.probe.state_dict()["state"] == state["state"]
    assert state["state"]["lasting"] == ["0", "4"], "normalization has no features"
    assert (state["steps"], state["state"]["measured"]) == (5, 2)


def test_many_differences_are_counted():
    other = nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)))
    probe = SpectralProbe(other, torch.optim.SGD(other.parameters()), every_n_steps=1)
    with pytest.raises(ValueError, match=r"1.weight is gone, .*, 4.bias is \(2,\), was \(3,\), and 5 more$"):
        probe.load_state_dict(Run().train(range(3)).state()["probe"])


def test_another_model_is_refused():
    state, other = Run().train(range(3)).state(), Run(width=7)
    start = other.probe.state_dict()["tensors"]["start"]["0"][0][-1].clone()
    with pytest.raises(ValueError, match=r"other layers: 0 is \(7, 5\), was \(6, 5\), 0.bias is .* 4 is \(3, 7\), .*"):
        other.probe.load_state_dict(state["probe"])
    assert other.probe.steps == 0
    assert torch.equal(other.probe.state_dict()["tensors"]["start"]["0"][0][-1], start)


def test_what_starts_anew_is_said():
    state, other = Run().train(range(3)).state(), Run()
    state["probe"]["tensors"]["probe"]["device"] = "cuda"
    del state["probe"]["tensors"]["start"]["0"]
    with pytest.warns(SpectralMonitorWarning, match=r"at step 3: drift .* of 0, .*; feature_drift .* on cuda, .* cpu"):
        other.load(state)
    start = {key: p.detach().clone() for key, p in other.model.named_parameters()}
    other.train(range(3, 8))
    drift = ((other.model[0].weight - start["0.weight"]).norm() / start["0.weight"].norm()).item()
    assert other.probe.latest.value("drift_fro_ratio", "0") == pytest.approx(drift, rel=1e-4)
    assert other.probe.measurements[1].value("feature_drift", "0") > 0


class Corrected(Run):
    """Its weights are given their size before the first step; ``saved``: loaded before the probe is made."""

    def __init__(self, saved=None):
        super().__init__()
        for key in () if saved is None else ("model", "optimizer"):
            getattr(self, key).load_state_dict(saved[key])
        rule = LRCorrection("target", spectral_init=3.0)
        settings = {"quantities": rule.quantities, "correction": rule, "mode": "correct"}
        self.probe = SpectralProbe(self.model, self.optimizer, every_n_steps=2, **settings)


@pytest.mark.parametrize("first", [False, True], ids=["probe first", "weights first"])
def test_weights_that_are_loaded_keep_their_size(first):
    state = (whole := Corrected().train(range(7))).state()
    rest = Corrected(state if first else None).load(state)
    loaded = {key: value.clone() for key, value in rest.model.state_dict().items()}
    assert all(torch.equal(value, state["model"][key]) for key, value in loaded.items())
    rest.train(range(7, 12))
    whole.train(range(7, 12))
    for p, q in zip(rest.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_those_of_a_new_run_are_given_it_at_the_first_step():
    run = Corrected()
    begin = run.model[0].weight.detach().clone()
    run.train(range(1))
    assert run.model[0].weight.norm() > 2 * begin.norm()


def test_those_of_a_run_that_was_saved_before_its_first_step_too():
    whole, state = Corrected().train(range(3)), Corrected().state()
    rest = Corrected().load(state).train(range(3))
    for p, q in zip(rest.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_batch_of_a_model_that_was_pruned_then_leaves_nothing_on_one_that_is_not():
    """The weight of the pruned one was an attribute, which would hide the parameter of the other."""
    run = Run()
    prune.random_unstructured(run.model[0], "weight", amount=0.5)
    with pytest.warns(SpectralMonitorWarning, match="not measured any more: 0"):
        run.train(range(2))
    prune.remove(run.model[0], "weight")
    state, other = run.state(), Run()
    with pytest.warns(SpectralMonitorWarning, match=r"feature_drift is counted from here .*0.weight is a parameter"):
        other.load(state)
    assert "weight" not in vars(other.model[0])
    before = other.model[0].weight.detach().clone()
    other.train(range(2, 4))
    assert not torch.equal(other.model[0].weight, before)
