"""What nobody plans for: sinks that fail now and then, clocks that jump, names of any characters, 10,000 layers."""

from __future__ import annotations

import csv
import json
import math
import random
import time
import warnings
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from spectral_monitor import SpectralMonitor, SpectralMonitorWarning, SpectralProbe
from spectral_monitor.cli import main
from spectral_monitor.engine import guards, overhead_budget
from spectral_monitor.reporting import JSONLinesSink, TensorBoardSink, read_measurements
from tests.cli.logged_runs import FILE
from tests.noninterference import zoo
from tests.noninterference.recorder import RecordingLogger, Run, of_module, of_optimizer
from tests.one_step import training_step


def net(names=("first", "last")):
    torch.manual_seed(0)
    model = nn.Sequential()
    for name in names:
        model.add_module(name, nn.Linear(6, 6))
    return model


def train(model, steps, probe=None):
    """The record of every step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    watched = None if probe is None else probe(model, optimizer)
    generator, found = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        x = torch.randn(8, 6, generator=generator)
        if watched is None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        else:
            with training_step(watched, optimizer):
                model(x).square().mean().backward()
        found.append({**of_module(model), **of_optimizer(optimizer)})
    return found, watched


# --- sinks


class Moody:
    """Fails now and then, each time in another place and with another kind of error."""

    def __init__(self, seed):
        self.draw, self.taken = random.Random(seed), []

    def write(self, measurement):
        if self.draw.random() < 0.3:
            raise self.draw.choice([OSError, ValueError, KeyError, RuntimeError, AssertionError])("moody")
        self.taken.append(measurement.step)
        if self.draw.random() < 0.2:
            raise TimeoutError("taken, but not said so")

    def close(self):
        raise ConnectionError("moody")


class MoodyLogger(RecordingLogger):
    """A logger of Lightning that does the same."""

    def __init__(self, seed):
        super().__init__(Run())
        self.draw, self.failures = random.Random(seed), 0

    def log_metrics(self, metrics, step=None):
        if any(key.startswith("spectral") for key in metrics) and self.draw.random() < 0.4:
            self.failures += 1
            raise self.draw.choice([OSError, ValueError, KeyError])("moody")
        super().log_metrics(metrics, step)


@pytest.mark.parametrize("seed", range(3))
def test_sinks_that_fail_now_and_then(seed, tmp_path):
    """The others have every measurement, the moody one what it took; each kind of failure is said once."""
    moody, steady = Moody(seed), JSONLinesSink(tmp_path / FILE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SpectralMonitorWarning)
        plain, _ = train(net(), 20)
        seen, probe = train(
            net(), 20, lambda *pair: SpectralProbe(*pair, every_n_steps=1, sinks=[moody, steady], mode="observe")
        )
        probe.close()
    assert seen == plain
    assert [m.step for m in read_measurements(steady.path)] == [m.step for m in probe.measurements] == [*range(1, 21)]
    assert 0 < len(moody.taken) < 20
    said = [str(w.message) for w in caught if w.category is SpectralMonitorWarning]
    assert len(said) == len(set(said)) <= 7
    assert sum("was not closed" in text for text in said) == 1


def test_a_logger_that_fails_now_and_then():
    steady, moody = RecordingLogger(Run()), MoodyLogger(3)
    for logger in (steady, moody):
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SpectralMonitorWarning)
            trainer = zoo.fit(zoo.Classifier(), zoo.loader(count=12), [SpectralMonitor(1, mode="observe")], logger)
        assert trainer.global_step == 12
    assert 0 < moody.failures < 12
    assert moody.run.calls == steady.run.calls, "what is not the monitor's arrives as ever"

    def without_cost(calls):
        return [(step, {k: v for k, v in values.items() if "overhead" not in k}) for step, values in calls]

    expected = without_cost(steady.spectral)
    assert all(repr(call) in map(repr, expected) for call in without_cost(moody.spectral))


# --- clocks


STEPS = 20


class Jumps:
    """Seconds that go on mostly, and now and then jump by up to a year, ahead or back."""

    def __init__(self, seed):
        self.draw, self.now = random.Random(seed), 0.0

    def __call__(self):
        jump = self.draw.uniform(-3e7, 3e7) if self.draw.random() < 0.1 else 0.0
        self.now += self.draw.random() / 100 + jump
        return self.now


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("share", [None, 0.01, 0.9])
def test_a_clock_that_jumps(seed, share, monkeypatch):
    """Which steps are measured may depend on it; nothing else does, and no number but the cost is touched."""
    clock = Jumps(seed)
    monkeypatch.setattr(overhead_budget, "perf_counter", clock)
    monkeypatch.setattr(guards, "time", SimpleNamespace(perf_counter=clock))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SpectralMonitorWarning)
        seen, probe = train(
            net(), STEPS, lambda *pair: SpectralProbe(*pair, every_n_steps=1, max_overhead=share, mode="observe")
        )
    assert seen == train(net(), STEPS)[0]
    assert [str(w.message) for w in caught if "failed" in str(w.message)] == []
    steps = [m.step for m in probe.measurements]
    assert steps[0] == 1
    assert share is not None or steps == [*range(1, STEPS + 1)]
    _, calm = train(net(), STEPS, lambda *pair: SpectralProbe(*pair, every_n_steps=1, mode="observe"))
    expected = {m.step: m for m in calm.measurements}
    for m in probe.measurements:
        for name in ("first", "last"):
            assert m.value("update_norm", name) == expected[m.step].value("update_norm", name)
        assert math.isfinite(m.summary["overhead_ms"])


# --- names

NAMES = ("a/b", "%s %d %", "{} {0} {x!r}", "two\nlines\r", "tab\t", "层 Ünï", "\x1b[31m", "<b>&amp;", "*", "[a-z]?")
NAMES += (" ", "summary", "network", "weight", "-", "'\"`\\", "\u200b", "\u2028", "a" * 300)


@pytest.fixture
def named(tmp_path):
    """A run of layers of such names, with a fault, in every kind of file."""
    model = net(NAMES)
    groups = [{"params": [p], "lr": 10.0 if i == 4 else 1e-3} for i, p in enumerate(model.parameters())]
    optimizer = torch.optim.Adam(groups, lr=1e-3)
    sinks = [JSONLinesSink(tmp_path / FILE), TensorBoardSink(SummaryWriter(tmp_path))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        probe = SpectralProbe(model, optimizer, every_n_steps=1, sinks=sinks)
        for _ in range(5):
            with training_step(probe, optimizer):
                model(torch.randn(8, 6)).square().mean().backward()
        probe.close()
    return tmp_path, probe


def test_names_of_any_characters_are_in_every_file(named, capsys):
    folder, probe = named
    assert {name for name in NAMES if probe.latest.value("update_norm", name) > 0} == set(NAMES)
    assert [m.layers for m in read_measurements(folder / FILE)] == [probe.latest.layers] * 5
    assert main(["show", str(folder), "--json"]) == 0
    layers = [row["layer"] for row in json.loads(capsys.readouterr().out)["layers"]]
    assert set(NAMES) <= set(layers)
    assert main(["export", str(folder)]) == 0
    assert set(NAMES) <= {row[1] for row in csv.reader(capsys.readouterr().out.splitlines(keepends=True)[1:])}
    page = folder / "page.html"
    assert main(["report", str(folder), "-o", str(page)]) == 0
    text = page.read_text()
    assert "<b>&amp;" not in text
    assert "a/b" in text


@pytest.mark.parametrize("command", [["show"], ["show", "--all"], ["verdicts"], ["list"]])
def test_names_of_any_characters_steer_no_terminal(named, command, capsys):
    folder, _ = named
    assert main([command[0], str(folder), *command[1:]]) == (command == ["verdicts"])
    out = capsys.readouterr().out
    assert all(c.isprintable() or c == "\n" for c in out)


def test_names_of_any_characters_under_lightning(tmp_path):
    class Named(zoo.Classifier):
        def __init__(self):
            super().__init__(lambda: nn.Sequential(nn.Linear(8, 6), net(NAMES), nn.Linear(6, zoo.CLASSES)))

    monitor = SpectralMonitor(1, mode="observe")
    loggers = [CSVLogger(tmp_path), TensorBoardLogger(tmp_path)]
    trainer = zoo.fit(Named(), zoo.loader(), [monitor], loggers)
    assert trainer.global_step == 6
    assert len(monitor.measurements) == 6
    assert {f"net.1.{name}" for name in NAMES} <= {info.name for info in monitor.latest.layers}


# --- many layers

MANY = 10_000


@pytest.mark.slow
def test_ten_thousand_layers():
    """In time that grows with their number, not with its square: 10 seconds, not 10 minutes."""
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(MANY))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    begin = time.process_time()
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities="light", mode="observe")
    before = torch.stack([layer.weight.detach() for layer in model]).double()
    with probe.step():
        for layer in model:
            layer.weight.grad = torch.ones(4, 4)
        model[7].weight.grad *= 1e4
        optimizer.step()
    latest = probe.latest
    assert time.process_time() - begin < 100
    assert len(latest.layers) == MANY
    after = torch.stack([layer.weight.detach() for layer in model]).double()
    expected = torch.linalg.matrix_norm(after - before, 2).float()
    torch.testing.assert_close(latest.values["update_norm"], expected, rtol=0.01, atol=0)
    lines = latest.table().splitlines()
    assert len(lines) < 50
    assert any(line.split()[0] == "7" for line in lines if line.split()), "the odd one is not folded away"
