"""A budget of time stretches the interval: by a clock that the tests set, closed forms of which steps are measured."""

from __future__ import annotations

import json
import random
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from spectral_monitor import LRCorrection, SpectralMonitor, SpectralMonitorWarning, SpectralProbe
from spectral_monitor.engine import Settings, guards
from spectral_monitor.engine import overhead_budget as budget
from spectral_monitor.engine.overhead_budget import Budget, plain_time
from spectral_monitor.engine.schedule import Timetable

KEYS = frozenset({"lr"})


@dataclass
class Clock:
    """Seconds that tests let pass."""

    now: float = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(budget, "perf_counter", clock)
    return clock


@dataclass
class Loop:
    """Training as a budget sees it.

    Attributes:
        plain: step -> seconds of it without the monitor.
        cost: number of the measurement -> seconds it adds.
        own: the part of it that the monitor counts itself.
    """

    clock: Clock
    share: float = 0.01
    every: object = 1
    plain: object = lambda step: 1.0
    cost: object = lambda k: 0.5
    own: object = lambda k: 0.0
    keys: frozenset = KEYS
    several: bool = False
    free: int = 0
    steps: list = field(default_factory=list)
    costs: list = field(default_factory=list)
    news: list = field(default_factory=list)
    found: dict = field(default_factory=dict)
    budget: Budget = None

    def __post_init__(self):
        self.budget = self.budget or Budget(self.share, self.several, self.free)
        self.timetable = Timetable.of(self.every, sorted(self.keys))

    def run(self, steps):
        for step in steps:
            self.budget.begin(step)
            keys = self.budget.granted(step, self.timetable.due(step))
            self.news += [self.budget.news] if self.budget.news else []
            self.clock.now += self.plain(step)
            if keys:
                k = len(self.steps)
                self.clock.now += self.cost(k)
                told = self.budget.wait if self.several else None
                self.budget.measured(step, self.own(k), told)
                self.steps.append(step)
                self.costs.append(self.cost(k))
                self.found[step] = keys
        return self


def spent(loop):
    """After the warm-up, of each interval: cost of the step it begins with, over the time of the unmeasured ones."""
    pairs = list(zip(pairwise(loop.steps), loop.costs, strict=False))[2:]
    return [cost / sum(loop.plain(step) for step in range(a, b)) for (a, b), cost in pairs]


def test_a_constant_cost(clock):
    """Half a step's time at 1 %: every 50th step; three in the beginning, which 150 steps pay for."""
    loop = Loop(clock).run(range(1, 402))
    assert loop.steps == [1, 4, 7, 151, 201, 251, 301, 351, 401]


def test_steps_stay_those_of_the_schedule(clock):
    assert Loop(clock, every=20).run(range(1, 400)).steps == [20, 40, 60, 180, 240, 300, 360]
    assert Loop(clock, every=200).run(range(1, 1000)).steps == [200, 400, 600, 800], "nothing to stretch"
    words = Loop(clock, every="1, 2, 4, ..., every 64").run(range(1, 500)).steps
    assert words == [1, 4, 8, 192, 256, 320, 384, 448]


def test_where_a_step_costs_little_every_one_is_measured(clock):
    loop = Loop(clock, share=0.5, cost=lambda k: 0.25).run(range(1, 12))
    assert loop.steps == [1, *range(4, 12)], "half a step, which any is away; after the first one nothing is known"


@pytest.mark.parametrize("seed", range(5))
def test_growing_and_noisy_costs_stay_below_the_share(clock, seed):
    draw = random.Random(seed)
    noise = [draw.lognormvariate(0, 0.5) for _ in range(20_000)]
    growing = Loop(clock, cost=lambda k: 0.1 * 1.2**k).run(range(1, 20_000))
    noisy = Loop(clock, share=0.05, every=3, cost=lambda k: noise[k]).run(range(1, 20_000))
    both = Loop(clock, share=0.05, plain=lambda step: noise[step], cost=lambda k: noise[-k]).run(range(1, 20_000))
    assert max(spent(growing)) <= 0.01 * (1 + 1e-9)
    assert max(spent(noisy)) <= 0.05 * (1 + 1e-9)
    seconds = sum(noise[both.steps[2] : both.steps[-1]])
    total = sum(both.costs[2:-1]) / seconds
    assert 0.03 < total <= 0.05, "all but what the estimate of an unmeasured step is on the low side"
    assert min(len(growing.steps), len(noisy.steps), len(both.steps)) > 20, "and it goes on measuring"


def test_the_first_two_are_not_waited_for(clock):
    """Compilation takes as long as 1000 steps; 10 000 would pass by the rule. They count as the third one does."""
    first = {0: 1000.0, 1: 300.0}
    loop = Loop(clock, share=0.1, every=10, cost=lambda k: first.get(k, 5.0)).run(range(1, 400))
    assert loop.steps == [10, 20, 30, 160, 210, 260, 310, 360], "10 + 3 x 50"
    cheap = {0: 1.0, 1: 0.0}
    loop = Loop(clock, share=0.1, every=10, cost=lambda k: cheap.get(k, 5.0)).run(range(1, 200))
    assert loop.steps == [10, 20, 30, 80, 130, 180], "10 + 10 + 0 + 50 is not later than 30 + 50"


def test_the_first_steps_may_be_free(clock):
    """Those are measured whatever that takes, and are not made up for; afterwards the share holds."""
    loop = Loop(clock, every="1, 2, 4, ..., every 100", cost=lambda k: 3.0, free=100)
    steps = loop.run(range(1, 2000)).steps
    assert steps[:8] == [1, 2, 4, 8, 16, 32, 64, 100]
    assert {later - earlier for earlier, later in pairwise(steps[7:])} == {300}


def test_the_default_schedule_has_a_budget_and_what_a_user_names_has_none():
    def found(corrected=False, **arguments):
        made = budget.budget_for(SpectralMonitor(**arguments).settings, False, corrected)
        return None if made is None else (made._share, made._free)

    assert found() == (0.01, 100)
    assert found(max_overhead=0.05) == (0.05, 0)
    assert found(corrected=True, max_overhead=0.05) == (0.05, 0)
    assert found(max_overhead=None) is found(every_n_steps=50) is found(corrected=True) is None


def test_the_monitors_own_clock_is_the_least_it_costs(clock):
    """What runs at the same time on a device seems to cost nothing."""
    loop = Loop(clock, every=10, cost=lambda k: 0.0, own=lambda k: 0.4).run(range(1, 300))
    assert loop.steps == [10, 20, 30, 130, 170, 210, 250, 290]


def test_the_step_behind_a_measured_one_says_nothing_of_unmeasured_ones(clock):
    """It waits for what the measured one has left to the device."""
    loop = Loop(clock, every=4)
    loop.plain = lambda step: 10.0 if step - 1 in loop.steps else 1.0
    assert loop.run(range(1, 300)).steps == [4, 8, 12, 156, 208, 260]


def test_stalls_do_not_count(clock):
    """Every tenth step takes a minute: an unmeasured step is still one of a second."""
    assert plain_time([1.0] * 7 + [60.0]) == 1.0
    loop = Loop(clock, every=50, cost=lambda k: 2.0, plain=lambda step: 60.0 if step % 10 == 5 else 1.0)
    assert loop.run(range(1, 1500)).steps == [50, 100, 150, 650, 850, 1050, 1250, 1450]


def test_validation_and_checkpoints_are_no_part_of_a_step(clock):
    loop = Loop(clock, every=10)
    for step in range(1, 200):
        loop.run([step])
        loop.budget.pause()
        clock.now += 500.0
        loop.budget.pause()
    assert loop.steps == [10, 20, 30, 160]


def test_all_batches_of_a_step_are_its_time(clock):
    """Four batches of a second for each step, and a pause in the second: half a second more is 1/8 of a step."""
    budget_, measured = Budget(0.01), []
    for step in range(1, 100):
        for batch in range(4):
            budget_.begin(step)
            clock.now += 1.0
            if batch == 1:
                budget_.pause()
                clock.now += 7.0
        if budget_.granted(step, KEYS):
            clock.now += 0.5
            budget_.measured(step, 0.0)
            measured.append(step)
    assert measured == [1, 4, 7, 39, 52, 65, 78, 91], "12.5 steps apart"


def test_what_was_passed_over_comes_with_the_next_measured_step(clock):
    """Rare quantities would else starve, for a frequent one may always have been measured shortly before."""
    every = {"light": 10, "standard": 100}
    keys = frozenset({"lr", "bfa"})
    loop = Loop(clock, every=every, cost=lambda k: 0.25, keys=keys).run(range(1, 400))
    assert loop.steps == [10, 20, 30, 90, 120, 150, 180, 210, 240, 270, 300, 330, 360, 390]
    assert [step for step in loop.steps if "bfa" in loop.found[step]] == [120, 210, 300]


def test_it_is_said_once_and_when_the_interval_has_become_another_one(clock):
    """Costs 0.5 up to the 8th measurement, then 0.75, 2, and in the end 0.25 of a step."""
    costs = [*[0.5] * 8, *[0.75] * 4, *[2.0] * 4, *[0.25] * 99]
    loop = Loop(clock, cost=lambda k: costs[k]).run(range(1, 2200))
    assert [text.split(",")[0] for text in loop.news] == [
        "step 8: measured steps are now at least 144 steps apart",
        "step 152: measured steps are now at least 50 steps apart",
        "step 702: measured steps are now at least 200 steps apart",
        "step 1502: measured steps are now at least 25 steps apart",
    ]
    assert "measuring takes at most 1 % of training time: the last one took the time of 0.5 more steps" in loop.news[0]
    assert not Loop(clock, every=100).run(range(1, 2000)).news, "nothing was stretched"


@pytest.mark.parametrize("cut", [1, 2, 4, 5, 7, 8, 30, 151, 152, 200, 201, 260])
@pytest.mark.parametrize("several", [False, True])
def test_it_goes_on_where_another_one_left_off(clock, cut, several):
    """The run that goes on has saved a state at the same step, which takes time that is no step's."""
    draw = random.Random(1)
    noise = [draw.lognormvariate(0, 0.3) for _ in range(600)]
    keys = frozenset({"lr", "bfa"})
    every = {"lr": 1, "bfa": 7}
    arguments = {"share": 0.1, "every": every, "keys": keys, "several": several, "plain": lambda step: noise[step]}
    whole = Loop(clock, cost=lambda k: noise[-k], **arguments).run(range(1, cut + 1))
    state = json.loads(json.dumps(whole.budget.state_dict()))
    k = len(whole.steps)
    whole.run(range(cut + 1, 500))
    other = Budget(0.1, several)
    other.load_state_dict(state, keys)
    clock.now = 5.0
    rest = Loop(clock, cost=lambda i: noise[-k - i], budget=other, **arguments).run(range(cut + 1, 500))
    assert rest.found == {step: keys for step, keys in whole.found.items() if step > cut}
    assert rest.news == whole.news[len(whole.news) - len(rest.news) :]
    assert len(rest.steps) > 2


@pytest.mark.parametrize("cut", [2, 5, 30, 160, 199])
@pytest.mark.parametrize("start", [1, 1000])
@pytest.mark.parametrize("carried", [True, False])
def test_another_fit_counts_from_its_own_start(clock, cut, start, carried):
    """Lightning's second Trainer begins at 1 again; what was measured is as many steps ago as it would have been."""
    whole = Loop(clock).run(range(1, 400)).steps
    loop = Loop(clock).run(range(1, cut + 1))
    if carried:
        state, loop.budget = loop.budget.state_dict(), Budget(0.01)
        loop.budget.load_state_dict(state, KEYS)
    count = len(loop.steps)
    loop.run(range(start, start + 399 - cut))
    assert [step - start + cut + 1 for step in loop.steps[count:]] == whole[count:]


def test_a_batch_that_is_begun_again_for_the_same_step_changes_nothing(clock):
    """As after an exception in the middle of it."""
    loop = Loop(clock).run(range(1, 31))
    state = loop.budget.state_dict()
    other = Loop(clock, budget=Budget(0.01))
    other.budget.load_state_dict(state, KEYS)
    assert other.run(range(30, 210)).steps == [151, 201]


def test_what_is_not_measured_any_more_is_not_made_up_for():
    first, second = Budget(0.1), Budget(0.1)
    first.measured(1, 1.0)
    assert not first.granted(2, frozenset({"lr", "bfa"}))
    second.load_state_dict(first.state_dict(), ["lr"])
    assert second.granted(10, frozenset({"lr"})) == {"lr"}


def test_several_processes_decide_alike_by_the_clock_of_the_first(clock):
    """One measured step later than a process alone, for at a measured step the one before is known."""
    first, second = Budget(0.01, distributed=True), Budget(0.01, distributed=True)
    clocks = [Clock(), Clock(7.0)]
    measured = []
    for step in range(1, 400):
        granted = []
        for one, now, pace in zip((first, second), clocks, (1.0, 3.0), strict=True):
            clock.now = now.now
            one.begin(step)
            granted.append(one.granted(step, KEYS))
            now.now += pace
        assert granted[0] == granted[1]
        if granted[0]:
            told = first.wait
            for one, now, cost in zip((first, second), clocks, (0.5, 100.0), strict=True):
                now.now += cost
                one.measured(step, 0.0, told)
            measured.append(step)
    assert measured == [1, 4, 7, 10, 154, 204, 254, 304, 354]
    assert first.interval == second.interval == 50


@pytest.mark.parametrize("share", [0, 1, -0.1, 1.5, True, "0.01", float("nan")])
@pytest.mark.parametrize("make", [Settings, SpectralMonitor, lambda **given: SpectralProbe(None, None, **given)])
def test_nonsense_is_refused_before_there_is_anything_to_train(make, share):
    with pytest.raises(ValueError, match=r"max_overhead must be a share of training time in \(0, 1\), .* got"):
        make(max_overhead=share)


class Slow(nn.Module):
    """A second for each forward; the clock is no part of it, for what is would be put back after a replay."""

    def __init__(self, *layers):
        super().__init__()
        self.net = nn.Sequential(*layers)

    def forward(self, x):
        budget.perf_counter.now += 1.0
        return self.net(x)


def trained(clock, monkeypatch, steps=120, resume=None, pace=1, **arguments):
    """A real loop; only time is made up: a second for each forward, of which a measured step has two.

    ``pace``: of the clock by which the monitor counts what it does itself.
    """
    monkeypatch.setattr(guards, "time", SimpleNamespace(perf_counter=lambda: pace * clock.now))
    torch.manual_seed(0)
    net = Slow(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    probe = None if not arguments else SpectralProbe(net, optimizer, **arguments)
    states, weights = {}, []
    if resume is not None:
        probe.load_state_dict(resume)
    for step in range(probe.steps + 1 if probe else 1, steps + 1):
        torch.manual_seed(step)
        with probe.step() if probe else nullcontext():
            optimizer.zero_grad()
            net(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
        weights.append([p.detach().clone() for p in net.parameters()])
        if probe and step in (7, 20, 38):
            states[step] = probe.state_dict()
    return probe, states, weights


def test_a_probe_keeps_to_it(clock, monkeypatch):
    """A second more, at 10 %: 10 steps apart; the first three, 3 apart, are paid for until step 31.

    The sixth, at step 51, takes two seconds, for ``feature_drift`` has a forward of its own.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SpectralMonitorWarning)
        probe, _, weights = trained(clock, monkeypatch, every_n_steps=1, max_overhead=0.1)
    steps = [m.step for m in probe.measurements]
    assert steps == [1, 4, 7, 31, 41, 51, 71, 81, 91, 101, 111]
    assert [m.summary.get("interval") for m in probe.measurements] == [None, *(b - a for a, b in pairwise(steps))]
    assert [str(one.message).split(",")[0] for one in caught] == [
        "step 8: measured steps are now at least 24 steps apart",
        "step 32: measured steps are now at least 10 steps apart",
    ]
    plain = trained(clock, monkeypatch)[2]
    for one, other in zip(plain, weights, strict=True):
        assert all(map(torch.equal, one, other)), "training is the same"


@pytest.mark.filterwarnings("ignore:step .* measured steps are now")
def test_what_a_probe_counts_itself_is_the_least_it_costs(clock, monkeypatch):
    probe, _, _ = trained(clock, monkeypatch, steps=170, pace=4, every_n_steps=1, max_overhead=0.1)
    assert [m.step for m in probe.measurements] == [1, 4, 7, 121, 161], "40 steps apart, not 10"


@pytest.mark.parametrize("at", [7, 20, 38])
@pytest.mark.filterwarnings("ignore:step .* measured steps are now")
def test_a_probe_goes_on_with_it(clock, monkeypatch, at):
    arguments = {"every_n_steps": {"light": 1, "standard": 3}, "max_overhead": 0.1}
    whole, states, _ = trained(clock, monkeypatch, **arguments)
    rest, _, _ = trained(clock, monkeypatch, resume=states[at], **arguments)
    expected = [(m.step, list(m.values)) for m in whole.measurements if m.step > at]
    assert [(m.step, list(m.values)) for m in rest.measurements] == expected
    assert len(expected) > 4


@pytest.mark.filterwarnings("ignore:step .* measured steps are now")
def test_a_corrections_own_steps_are_passed_over_too(clock, monkeypatch):
    correction = {"mode": "correct", "correction": LRCorrection("target")}
    probe, _, _ = trained(clock, monkeypatch, every_n_steps=16, max_overhead=0.1, **correction)
    steps = [m.step for m in probe.measurements]
    assert steps[:6] == [1, 4, 7, 32, 46, 57], "2, 3, 5 and 6 are not, nor are those up to 32"
    assert len(steps) < 12


def test_without_a_budget_nothing_is_timed(monkeypatch):
    def never():
        raise AssertionError("the clock was read")

    monkeypatch.setattr(budget, "perf_counter", never)
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    probe = SpectralProbe(net, optimizer, every_n_steps=1, quantities="light")
    with warnings.catch_warnings(), probe.step():
        warnings.simplefilter("error")
        net(torch.randn(3, 2)).sum().backward()
        optimizer.step()
    assert "interval" not in probe.latest.summary
    assert probe.state_dict()["state"]["budget"] is None
