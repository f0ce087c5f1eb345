"""Forty-two calls that people try: those that make sense work, the others say what to use.

The first ones are those that the walk through the package as a new user found missing.
"""

from __future__ import annotations

import copy
import pickle
import random
import re

import numpy as np
import pytest
import torch
from torch import nn

import spectral_monitor as sm
from spectral_monitor import SpectralMonitor
from spectral_monitor.reporting import read_measurements
from tests.one_step import training_step

LAYERS = [f"net.{k}" for k in (0, 2, 4, 6, 8)]
NAMES = [name for layer in LAYERS for name in (layer, f"{layer}.bias")]


class Surroundings:
    """What the calls are made on."""

    def __init__(self, monitor, folder, tmp_path):
        self.monitor, self.folder, self.tmp = monitor, folder, tmp_path
        self.file = folder / "spectral_monitor.jsonl"
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        self.batch = (torch.randn(16, 4), torch.randint(2, (16,)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loss = nn.functional.cross_entropy
        self.checkpoint = tmp_path / "model.pt"
        torch.save(self.model.state_dict(), self.checkpoint)


WORKS = {
    "monitor.to_pandas()": lambda s: set(s.monitor.to_pandas()["layer"]) == set(NAMES),
    'monitor.plot("update_natural")': lambda s: (
        {t.meta[0] for t in s.monitor.plot("update_natural").data if t.meta} == set(LAYERS)
    ),
    'monitor.latest["net.2"]': lambda s: (
        s.monitor.latest["net.2"]["update_ratio"] == s.monitor.latest.value("update_ratio", "net.2")
    ),
    "monitor.verdicts": lambda s: [v.layer for v in s.monitor.verdicts if v.is_root] == ["net.2"],
    'monitor.report("r.html")': lambda s: "net.2" in s.monitor.report(s.tmp / "r.html").read_text("utf-8"),
    "load(folder)": lambda s: [m.step for m in sm.load(s.folder)] == [3, 6, 9, 12],
    "load(file)": lambda s: len(sm.load(str(s.file))) == 4,
    "monitor.roles()": lambda s: list(s.monitor.roles()) == NAMES and "net.8  output" in repr(s.monitor.roles()),
    "monitor._repr_html_()": lambda s: "1 of 5 layers off" in s.monitor._repr_html_(),
    "monitor.assert_healthy()": lambda s: "net.2" in raised(AssertionError, s.monitor.assert_healthy),
    "SpectralMonitor(on_verdict=print)": lambda s: SpectralMonitor(on_verdict=print),
    'SpectralMonitor(stop_on="diverged")': lambda s: SpectralMonitor(stop_on="diverged"),
    "check(model, batch, optimizer, loss)": lambda s: (
        sm.check(s.model, s.batch, s.optimizer, s.loss).roles["0"] == "operator"
    ),
    "inspect(model)": lambda s: sm.inspect(s.model)["0"].keys() >= {"weight_norm", "weight_stable_rank"},
    "inspect(model.state_dict())": lambda s: (
        list(sm.inspect(s.model.state_dict()).roles) == ["0", "0.bias", "2", "2.bias"]
    ),
    'inspect("model.pt")': lambda s: sm.inspect(s.checkpoint)["2"] == sm.inspect(s.model)["2"],
    "dir(monitor)": lambda s: "to_pandas" in dir(s.monitor) and not [n for n in dir(s.monitor) if n.startswith("on_")],
    "monitor[-1]": lambda s: s.monitor[-1] is s.monitor.latest and "matrices=5, vectors=5," in repr(s.monitor[-1]),
    "load(run).latest": lambda s: (
        sm.load(s.folder).latest.step == 12
        and repr(sm.load(s.folder)) == "Run(measurements=4, steps=3 to 12, matrices=5, vectors=5)"
    ),
    "load(run).plot()": lambda s: len(sm.load(s.folder).plot().data) >= 5,
    "load(run).verdicts": lambda s: "lr_too_large" in {v.cause for v in sm.load(s.folder).verdicts},
    'monitor.plot(layers="net.2*")': lambda s: (
        {t.meta[0] for t in s.monitor.plot(layers="net.2*").data if t.meta} == {"net.2"}
    ),
    "latest.to_pandas()": lambda s: set(s.monitor.latest.to_pandas()["step"]) == {12},
    "pickle.dumps(monitor)": lambda s: pickle.loads(pickle.dumps(s.monitor)).roles() == s.monitor.roles(),
    "spectral_monitor.functional": lambda s: sm.functional.spectral_norm(torch.eye(3)) == 1,
    "SpectralMonitor(roles=monitor.roles())": lambda s: SpectralMonitor(roles=s.monitor.roles()),
}
SAYS = {
    "monitor.history": (lambda s: s.monitor.history, AttributeError, "measurements has the latest ones"),
    "monitor.to_dict()": (lambda s: s.monitor.to_dict(), AttributeError, "latest.to_rows() has a dict for each layer"),
    "monitor.ok": (lambda s: s.monitor.ok, AttributeError, "verdicts is empty when all is well"),
    "watch(model)": (lambda s: sm.watch(s.model), AttributeError, "use SpectralProbe(model, optimizer)"),
    'quantities=["grad_norm"]': (
        lambda s: SpectralMonitor(quantities=["grad_norm"]),
        ValueError,
        "lightning.pytorch.utilities.grad_norm has norms",
    ),
    "latest.value(layer, quantity)": (
        lambda s: s.monitor.latest.value("net.2", "update_ratio"),
        KeyError,
        "the quantity comes first: value('update_ratio', 'net.2')",
    ),
    'latest.value("update_rato", ...)': (
        lambda s: s.monitor.latest.value("update_rato", "net.2"),
        KeyError,
        "'update_rato' was not measured; did you mean 'update_ratio'?",
    ),
    'latest["net.22"]': (lambda s: s.monitor.latest["net.22"], KeyError, "no layer 'net.22'; did you mean 'net.2'?"),
    'latest["update_ratio"]': (lambda s: s.monitor.latest["update_ratio"], KeyError, "values['update_ratio']"),
    'monitor["net.2"]': (lambda s: s.monitor["net.2"], TypeError, "latest['net.2']"),
    "read_measurements(folder)": (
        lambda s: read_measurements(s.folder),
        IsADirectoryError,
        "spectral_monitor.load finds the run in it",
    ),
    "SpectralMonitor(every_n_step=5)": (
        lambda s: SpectralMonitor(every_n_step=5),
        TypeError,
        "SpectralMonitor has no argument 'every_n_step'; did you mean 'every_n_steps'?",
    ),
    'SpectralMonitor(stop_on="nan")': (
        lambda s: SpectralMonitor(stop_on="nan"),
        ValueError,
        "no cause 'nan'; did you mean 'diverged'?",
    ),
    'monitor.plot("update_natral")': (
        lambda s: s.monitor.plot("update_natral"),
        ValueError,
        "no quantity 'update_natral'; did you mean 'update_natural'?",
    ),
    "monitor.to_panda()": (lambda s: s.monitor.to_panda(), AttributeError, "did you mean 'to_pandas'?"),
    "spectral_monitor.SpectralMonitr": (lambda s: sm.SpectralMonitr, AttributeError, "did you mean 'SpectralMonitor'?"),
}


def raised(kind, call):
    with pytest.raises(kind) as error:
        call()
    return str(error.value)


@pytest.fixture
def around(faulty, tmp_path):
    return Surroundings(*faulty, tmp_path)


def test_there_are_42():
    assert len(WORKS) + len(SAYS) == 42


@pytest.mark.parametrize("call", WORKS)
def test_it_works(call, around):
    assert WORKS[call](around)


@pytest.mark.parametrize("call", SAYS)
def test_it_says_what_to_use(call, around):
    function, kind, said = SAYS[call]
    text = raised(kind, lambda: function(around))
    assert said in text.replace('\\"', '"'), text
    assert "\n" not in text


def test_what_is_said_to_use_is_there(around):
    """Every name in the advice exists, so that nobody is sent to another dead end."""
    from spectral_monitor.reporting.run import _INSTEAD

    for name, advice in _INSTEAD.items():
        assert not hasattr(around.monitor, name), name
        for word in re.findall(r"\b([a-z_]+)\(", advice):
            assert hasattr(around.monitor, word) or hasattr(around.monitor.latest, word) or word in ("print", "to_csv")
    for advice in sm._INSTEAD.values():
        for word in re.findall(r"spectral_monitor\.(\w+)", advice):
            assert hasattr(sm, word)


class Counting(nn.Module):
    """Its forward changes a buffer, a flag, a list, a dict, an array and a generator that it holds."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.calls, self.seen, self.facts = 0, [], {"draws": 0.0}
        self.array, self.random = np.zeros(1), random.Random(0)

    def forward(self, x):
        self.calls += 1
        self.seen.append(self.calls)
        self.array += 1
        self.facts["draws"] += self.random.random()
        return self.last(self.norm(self.first(x)).relu() * (1 + self.facts["draws"]))

    def held(self):
        return (self.calls, list(self.seen), dict(self.facts), float(self.array[0]), self.random.getstate())


def one_step(probe, model, optimizer, x):
    with training_step(probe, optimizer):
        model(x).square().mean().backward()
    return {key: value for key, value in probe.latest.scalars().items() if not key.endswith("overhead_ms")}


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda some: pickle.loads(pickle.dumps(some))], ids=["deep copy", "pickle"]
)
def test_a_copy_of_a_probe_and_its_model_goes_on_by_itself(duplicate):
    """What the replay of its reference batch puts back are the attributes of the copy."""
    torch.manual_seed(0)
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    some = (sm.SpectralProbe(model, optimizer, every_n_steps=1, quantities="full", drift_every=1), model, optimizer)
    for _ in range(2):
        one_step(*some, torch.randn(16, 8))
    twin = duplicate(some)
    before, held, x = copy.deepcopy(model.state_dict()), model.held(), torch.randn(16, 8)
    measured = one_step(*twin, x)
    assert model.held() == held
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    expected = one_step(*some, x)
    assert twin[1].held() == model.held() != held
    assert measured["spectral/feature_drift/first"] > 0
    assert measured == pytest.approx(expected, rel=1e-5, nan_ok=True)
