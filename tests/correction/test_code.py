"""Corrected learning rates as code: it runs, and makes the optimizer that the correction made of the one there is."""

from __future__ import annotations

import math
import re
import sys
import types
from contextlib import nullcontext
from functools import partial
from textwrap import indent

import pytest
import torch
from torch import nn

from spectral_monitor import LRCorrection, SpectralLRCorrector, SpectralProbe
from spectral_monitor.correction.param_groups_code import param_groups_code
from tests.callbacks.test_modes import Net, fit
from tests.correction.test_any_rate import run, warmup
from tests.correction.test_corrector import batch, perceptron


def made(code, network):
    """The optimizers that the code makes in a module's method."""
    names = {"self": network}
    exec(code, names)
    return [value for key, value in sorted(names.items()) if key.startswith("optimizer")]


def rates(optimizers):
    return {p: group["lr"] for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


class WithScores(nn.Module):
    """A network with a parameter that is not measured."""

    def __init__(self):
        super().__init__()
        self.net, self.scores = perceptron(), nn.Parameter(torch.ones(2, 3, 4, 5))
        self.register_forward_hook(lambda module, args, out: out * self.scores.mean())

    def forward(self, x):
        return self.net(x)

    def __getitem__(self, k):
        return self.net[k]


def test_what_is_left_out_has_the_rate_of_its_groups_peak():
    network = WithScores()
    peak = 1e-3

    make = partial(torch.optim.Adam, lr=peak)
    probe, _ = run(lambda network: make(network.parameters()), warmup, network=network, exclude=["scores"])
    (optimizer,) = made(probe.param_groups_code(), network)
    assert rates([optimizer])[network.scores] == pytest.approx(peak)  # not what is left of it


def test_it_makes_an_optimizer_that_steps_as_the_corrected_one():
    network = perceptron()
    kept = []

    def make(network):
        decayed = [p for p in network.parameters() if p.ndim > 1]
        rest = [p for p in network.parameters() if p.ndim == 1]
        kept.append(
            torch.optim.AdamW(
                [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
                lr=1e-3,
                betas=(0.9, 0.95),
            )
        )
        return kept[0]

    probe, _ = run(make, warmup, network=network)
    (optimizer,) = made(probe.param_groups_code(), network)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.defaults["betas"] == (0.9, 0.95)
    found = rates([optimizer])
    assert set(found) == set(network.parameters())
    multipliers, peak = probe.multipliers, 1e-3
    for layer in probe.anatomy.layers:
        expected = multipliers[layer.info.name] * peak
        assert found[layer.sources[0]] == pytest.approx(expected, rel=1e-3), layer.info.name
    for group in optimizer.param_groups:
        assert {group["weight_decay"]} == {0.1 if p.ndim > 1 else 0.0 for p in group["params"]}
    # The corrected optimizer at its peak, without momentum of before, goes where the one that was made goes.
    for group in kept[0].param_groups:
        group["lr"] = peak
    kept[0].state.clear()
    start = [p.detach().clone() for p in network.parameters()]
    after = []
    for step in ("corrected", "made"):
        with torch.no_grad():
            for p, value in zip(network.parameters(), start, strict=True):
                p.copy_(value)
        chosen = kept[0] if step == "corrected" else optimizer
        chosen.zero_grad()
        with probe.step() if step == "corrected" else nullcontext():
            network(batch(0, network)).logsumexp(-1).mean().backward()
            chosen.step()
        after.append([p.detach().clone() for p in network.parameters()])
    for p, q, before in zip(*after, start, strict=True):
        torch.testing.assert_close(q - before, p - before, rtol=2e-3, atol=1e-7)


def test_several_optimizers_are_several():
    network = perceptron()
    first, last = network[:3].parameters(), network[4].parameters()
    optimizers = [torch.optim.SGD(first, lr=0.1, momentum=0.9), torch.optim.Adam(last)]
    probe = SpectralProbe(
        network, optimizers, every_n_steps=1, mode="correct", quantities="light", correction=LRCorrection()
    )
    for step in range(4):
        with probe.step():
            network(batch(step, network)).logsumexp(-1).mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    found = made(probe.param_groups_code(), network)
    assert [type(optimizer) for optimizer in found] == [torch.optim.SGD, torch.optim.Adam]
    assert found[0].defaults["momentum"] == 0.9
    assert "optimizer_0 = " in probe.param_groups_code()
    assert set(rates(found)) == set(network.parameters())


def test_one_optimizer_has_no_number_and_no_argument_that_it_has_by_itself():
    usual = tuple(float(text) for text in ("0.9", "0.999"))  # equal, and another object
    probe, _ = run(lambda net: torch.optim.Adam(net.parameters(), lr=0.02, betas=usual), steps=2)
    code = probe.param_groups_code()
    assert "\noptimizer = torch.optim.Adam(\n" in code
    assert "betas" not in code


class Picky(torch.optim.SGD):
    """Takes groups of its own making alone, as some do."""

    def __init__(self, groups, strict, lr=0.1):
        assert all("params" in group for group in groups)
        super().__init__(groups, lr=lr)
        self.defaults["strict"] = strict


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_what_a_schedule_moves_up_and_down_is_not_taken_over(kind):
    """OneCycleLR goes through momenta and betas, and notes their ends in the groups."""
    network = perceptron()
    given = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(network.parameters(), lr=0.1, **given)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
    code = param_groups_code(network.named_parameters(), [optimizer], {})
    assert set(re.findall(r'"(\w+)":', code)) == {"params", "lr"}
    assert ("momentum=0.9" in code) == bool(given)


def test_it_makes_no_second_optimizer_to_know_what_was_given():
    network = perceptron()
    probe, _ = run(lambda net: Picky([{"params": list(net.parameters())}], "yes"), network=network, steps=3)
    code = probe.param_groups_code()
    assert '    strict="yes",\n)' in code
    assert code.startswith(f"import torch\nfrom {__name__} import Picky\nnamed = ")
    assert [type(optimizer) for optimizer in made(code, network)] == [Picky]


class Outer:
    """Holds a class of optimizers."""

    class Inner(torch.optim.SGD):
        """Nothing but another name."""


def of_module(name, kind):
    """A class of optimizers in a module of its own, as those of other packages are."""
    module = sys.modules[name] = types.ModuleType(name)
    module.Theirs = type("Theirs", (kind,), {"__module__": name})
    return module.Theirs


@pytest.fixture
def theirs(monkeypatch):
    for name in ("their_package", "other_package"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield [of_module("their_package", torch.optim.SGD), of_module("other_package", torch.optim.Adam)]
    for name in ("their_package", "other_package"):
        del sys.modules[name]


def test_optimizers_of_other_packages_are_imported(theirs):
    network = perceptron()
    kinds = [theirs[0], theirs[1], Outer.Inner, torch.optim.Adam, theirs[0]]
    optimizers = [kind([p], lr=0.1) for kind, p in zip(kinds, list(network.parameters())[: len(kinds)], strict=True)]
    code = param_groups_code(network.named_parameters(), optimizers, {})
    assert [type(optimizer) for optimizer in made(code, network)] == kinds
    alone = param_groups_code(network.named_parameters(), optimizers[:1], {})
    assert alone.startswith("import torch\nfrom their_package import Theirs\nnamed = ")
    assert "\noptimizer = Theirs(\n" in alone


def test_an_optimizer_of_the_script_or_of_a_function_is_called_as_there():
    class Local(torch.optim.SGD):
        """Cannot be imported."""

    network = perceptron()
    mine = type("Mine", (torch.optim.SGD,), {"__module__": "__main__"})
    for kind in (Local, mine):
        code = param_groups_code(network.named_parameters(), [kind(network.parameters(), lr=0.1)], {})
        names = {"self": network, kind.__name__: kind}
        exec(code, names)
        assert type(names["optimizer"]) is kind


def test_what_is_not_corrected_keeps_its_rate():
    network = nn.Sequential(nn.Linear(70, 16), nn.Linear(16, 5))
    probe, _ = run(lambda net: torch.optim.Adam(net.parameters(), lr=0.02), network=network, exclude=["0*"], steps=4)
    (optimizer,) = made(probe.param_groups_code(), network)
    found = rates([optimizer])
    assert found[network[0].weight] == 0.02 != found[network[1].weight]


def test_a_corrector_without_a_fit_has_none():
    with pytest.raises(RuntimeError, match="train with this callback first"):
        SpectralLRCorrector().param_groups_code()


def commented(code):
    """The method in the comment behind the code."""
    lines = [line.removeprefix("# ") for line in code.splitlines() if line.startswith("# ")]
    return "\n".join(lines[lines.index(next(line for line in lines if line.startswith("def "))) :])


def stepped_with(scheduler, method="", steps=52):
    """Learning rates of both groups in each step, and those the groups have when it is done."""
    names, inside, outside = {"Net": Net}, [], []
    exec(f"class Begins(Net):\n{indent(method or 'pass', '    ')}", names)
    module = names["Begins"](factor=0.5)

    def configure_optimizers():
        optimizer = Net.configure_optimizers(module)["optimizer"]
        optimizer.register_step_pre_hook(lambda o, *_: inside.append([group["lr"] for group in o.param_groups]))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler(optimizer), "interval": "step"}}

    module.configure_optimizers = configure_optimizers
    module.on_train_batch_end = lambda *_: outside.append(
        [group["lr"] for group in module.optimizers().optimizer.param_groups]
    )
    fit(module, steps=steps)
    return torch.tensor(inside), torch.tensor(outside)


schedulers = torch.optim.lr_scheduler
SCHEDULERS = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda step: math.cos(step / 60) * min(1, (step + 1) / 9)),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, [group["lr"] for group in o.param_groups], total_steps=60),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 60),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 20),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=10), schedulers.CosineAnnealingLR(o, 50)], [10]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_method_begins_at_a_tenth_under_any_scheduler(name):
    network = perceptron()
    method = commented(param_groups_code(network.named_parameters(), [torch.optim.Adam(network.parameters())], {}))
    alone, after = stepped_with(SCHEDULERS[name])
    slow, kept = stepped_with(SCHEDULERS[name], method)
    part = torch.where(torch.arange(52) < 48, 0.1, 1.0)[:, None]
    torch.testing.assert_close(slow, part * alone)
    assert torch.equal(kept, after), "schedulers and checkpoints do not see it"


def test_one_cycle_takes_the_rates_as_the_code_says():
    network = perceptron()
    groups = [{"params": [p], "lr": 0.1 * (k + 1)} for k, p in enumerate(network.parameters())]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    assert "OneCycleLR" not in param_groups_code(network.named_parameters(), [optimizer], {})
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
    rates_found = {p: 0.01 * (k + 1) for k, p in enumerate(network.parameters())}
    code = param_groups_code(network.named_parameters(), [optimizer], rates_found)
    (own,) = made(code, network)
    given = re.search(r"^# OneCycleLR .*max_lr=(.*)$", code, re.M).group(1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(own, eval(given, {"optimizer": own}), total_steps=21, pct_start=0.5)
    for _ in range(10):
        own.step()
        scheduler.step()
    assert rates([own]) == pytest.approx(rates_found, rel=0.01)


@pytest.mark.parametrize("nothing", [{"max_epochs": 0}, {"limit_train_batches": 0, "max_epochs": 1}])
def test_a_fit_without_a_step_finds_none(nothing):
    corrector = SpectralLRCorrector()
    fit(Net(), corrector, **nothing)
    with pytest.raises(RuntimeError, match="train with this callback first"):
        corrector.param_groups_code()


def test_a_later_fit_without_a_step_keeps_what_was_found():
    corrector = SpectralLRCorrector()
    fit(Net(), corrector, steps=3)
    found = corrector.param_groups_code()
    fit(Net(), corrector, max_epochs=0)
    assert corrector.param_groups_code() == found
