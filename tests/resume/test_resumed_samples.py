"""What is known of the first samples of batches outlives a run: its next measured step is of these again."""

from __future__ import annotations

import copy
import json
import warnings

import pytest
import torch
from torch import nn

from spectral_monitor import SpectralMonitorWarning, SpectralProbe
from tests.callbacks.quickfit import fit
from tests.noninterference import zoo
from tests.one_step import training_step
from tests.resume.resuming import EPOCH, Loop, change, measured, monitor, plain, resumed, said, saved, state_in

FEW = 3


def watching(**settings):
    return monitor(**{"every_n_steps": 1, "replay_samples": FEW, "mode": "observe", **settings})


def slices_in(path):
    return state_in(path)["slices"]


@pytest.mark.slow
@pytest.mark.parametrize("quantities", ["standard", "full"])
def test_every_number_is_that_of_the_uninterrupted_run(tmp_path, quantities):
    whole = watching(quantities=quantities)
    _, path = saved(tmp_path, whole, module=zoo.Classifier(), max_epochs=2)
    rest = watching(quantities=quantities)
    resumed(path, rest, module=zoo.Classifier())
    assert measured(rest) == measured(whole, after=EPOCH)
    assert len(rest.measurements) == EPOCH


def test_errors_of_a_drift_are_those_of_the_uninterrupted_run():
    """The probe batch are the first samples of one: the others of its rows, which were not compared, count."""

    def made():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        settings = {"quantities": ["feature_drift"], "replay_samples": 8, "drift_every": 1}
        return model, optimizer, SpectralProbe(model, optimizer, every_n_steps=1, **settings)

    def step(model, optimizer, probe):
        with training_step(probe, optimizer):
            model(torch.randn(64, 16)).square().mean().backward()

    whole, rest = made(), made()
    for _ in range(3):
        step(*whole)
    for old, new in zip(whole, rest, strict=True):
        new.load_state_dict(copy.deepcopy(old.state_dict()))
    state = torch.get_rng_state()
    step(*whole)
    torch.set_rng_state(state)
    step(*rest)
    for kind in ("values", "errors"):
        a, b = (getattr(some[2].latest, kind)["feature_drift"] for some in (whole, rest))
        assert torch.equal(a.nan_to_num(), b.nan_to_num())
        assert (a > 0).sum() == 2


def test_it_is_in_the_checkpoint_in_plain_types(tmp_path):
    _, path = saved(tmp_path, watching())
    known = slices_in(path)
    assert plain(known)
    assert len(json.dumps(known)) < 1000
    assert (known["samples"], known["off"], len(known["known"])) == (FEW, False, 1)
    _, path = saved(tmp_path / "without", watching(replay_samples=None))
    assert slices_in(path) is None


FORWARDS = []
"""Samples of every forward; a module's own list would be put back."""


class Told(nn.Module):
    """Does what it is told."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x, way="plain"):
        FORWARDS.append(len(x))
        h = torch.tanh(self.first(x))
        return self.head(h - h.mean(0) if way == "centred" else h)


class Run(Loop):
    def __init__(self, samples=FEW, dtype=torch.float32):
        torch.manual_seed(0)
        FORWARDS.clear()
        self.model = Told().to(dtype)
        self.dtype = dtype
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.probe = SpectralProbe(
            self.model, self.optimizer, every_n_steps=1, drift_every=5, replay_samples=samples, mode="observe"
        )

    def train(self, steps, *args):
        """The samples of the forwards of each step."""
        forwards = []
        for step in steps:
            torch.manual_seed(step)
            with training_step(self.probe, self.optimizer):
                self.model(torch.randn(8, 4, dtype=self.dtype), *args).square().mean().backward()
            forwards.append(list(FORWARDS))
            FORWARDS.clear()
        return forwards


@pytest.mark.parametrize("at", [0, 1, 2, 5])
def test_a_probe_goes_on_with_the_first_samples(at):
    whole = Run()
    whole.train(range(8))
    first = Run()
    first.train(range(at))
    rest = Run().load(first.state())
    forwards = rest.train(range(at, 8))
    assert [8, FEW, FEW, 8] not in forwards[at == 0 :]
    assert measured(rest.probe) == measured(whole.probe, after=at)


def test_a_word_that_was_not_met_is_looked_at_after_it_too():
    first = Run()
    first.train(range(2), "plain")
    rest = Run().load(first.state())
    assert [len(sizes) for sizes in rest.train(range(2, 4), "slanted")] == [4, 2]
    assert rest.train([4], "plain") == [[8, FEW]]
    with pytest.warns(SpectralMonitorWarning, match="replay_samples has no effect: the inputs of 'head'"):
        rest.train([5], "centred")


def test_where_the_first_samples_will_not_do_all_are_run_and_that_is_said_again():
    first = Run()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SpectralMonitorWarning)
        first.train(range(2), "centred")
    rest = Run().load(first.state())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SpectralMonitorWarning)
        assert rest.train(range(2, 5), "plain") == [[8, 8]] * 3, "as the run that was not interrupted"
    (text,) = said(caught)
    assert text.startswith("replay_samples has no effect: an earlier part of this run")
    whole = Run(samples=None)
    whole.train(range(2), "centred")
    whole.train(range(2, 5), "plain")
    assert measured(rest.probe) == measured(whole.probe, after=2)


@pytest.mark.parametrize("other", [{"samples": 2}, {"dtype": torch.float64}])
def test_of_other_samples_or_in_another_precision_it_is_seen_anew(other):
    first = Run()
    first.train(range(2))
    state = first.state()
    rest = Run(**other).load(state)
    assert [len(sizes) for sizes in rest.train(range(2, 4))] == [4, 2]


def test_where_layers_are_in_another_order_it_is_seen_anew():
    """What is known of them is by their numbers."""
    first = Run()
    first.train(range(2))
    state = first.state()
    state["probe"]["state"]["layers"].reverse()
    rest = Run().load(state)
    assert [len(sizes) for sizes in rest.train(range(2, 4))] == [4, 2]


def test_another_fit_of_the_module_goes_on_with_it():
    watch, module, forwards = watching(quantities=["feature_change"]), zoo.Classifier(), []
    module.net.register_forward_hook(lambda net, args, out: forwards.append(len(out)))
    fit(watch, module)
    batch = max(forwards)
    assert forwards == [batch, FEW, FEW, batch, *[batch, FEW] * (EPOCH - 1)]
    forwards.clear()
    fit(watch, module)
    assert forwards == [batch, FEW] * EPOCH


def test_a_state_without_it_is_read(tmp_path):
    """Of a monitor that had no ``replay_samples``."""
    _, path = saved(tmp_path, monitor(every_n_steps=1, mode="observe"))
    change(path, slices=None)
    watch = watching()
    resumed(path, watch)
    assert watch.latest.step == 2 * EPOCH
