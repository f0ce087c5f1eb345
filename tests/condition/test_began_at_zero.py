"""Layers wait for a matrix that began at zero, however rarely, and in whatever order, its quantities are measured."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from spectral_monitor import LRCorrection, SpectralProbe
from spectral_monitor.condition import Judge, SpectralCondition
from spectral_monitor.condition.network import Network
from spectral_monitor.condition.row import columns
from spectral_monitor.condition.trends.zero_start import GRACE, GROWN, STUCK, ZeroStartGate
from spectral_monitor.measurement import LayerInfo
from tests.condition.synthetic import LAYERS, ZERO, measured, nothing, set_by
from tests.one_step import training_step

FAST = {"update_natural": {"head": 10.0}}


def trained(every, *, mode="observe", quantities="light", steps=12, schedule=lambda step: 1.0, **settings):
    """A network whose readout begins at zero, under SGD."""
    torch.manual_seed(0)
    sizes = (32, 64, 64, 64, 10)
    layers = [part for pair in pairwise(sizes) for part in (nn.Linear(*pair), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    nn.init.zeros_(model[-1].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    probe = SpectralProbe(model, optimizer, every_n_steps=every, quantities=quantities, mode=mode, **settings)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(64, 32, generator=generator)
        with training_step(probe, optimizer):
            nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
        scheduler.step()
    return probe


SCHEDULES = [
    1,
    {"light": 1, "weight_natural": 2},
    {"light": 2, "weight_natural": 1},
    {"light": 5, "update_natural": 1, "lr": 1},
    {"light": 5, "update_natural": 1, "weight_natural": 1, "lr": 1},
    {"light": 1, "update_ratio": 5, "drift_ratio": 5},
    {"light": 1, "update_ratio": "2, 4, every 5", "drift_ratio": "2, 4, every 5"},
]


@pytest.mark.parametrize("every", SCHEDULES, ids=str)
def test_no_schedule_names_a_readout_that_begins_at_zero(every):
    probe = trained(every)
    assert not any(measurement.verdicts for measurement in probe.measurements)


@pytest.mark.parametrize("every", [{"light": 5, "update_natural": 1, "lr": 1}, {"light": 1, "drift_ratio": 5}], ids=str)
def test_nor_does_a_correction_act_on_it(every):
    probe = trained(every, mode="correct", correction=LRCorrection("balance"), steps=20)
    assert set(probe.multipliers.values()) == {1.0}


def test_a_learning_rate_of_zero_at_first_does_not_hide_it():
    probe = trained({"light": 5, "update_natural": 1, "lr": 1}, schedule=lambda step: float(step > 1))
    assert not any(measurement.verdicts for measurement in probe.measurements)


@pytest.mark.parametrize(
    ("every", "more", "first"),
    [
        ({"light": 6, "update_natural": "4, every 10"}, {}, 4),
        ({"light": 6, "update_natural": 3}, {"mode": "correct"}, 1),
        ({"light": 6, "update_natural": 1}, {"quantities": ["lr", "update_natural"]}, 1),
    ],
)
def test_the_first_measured_step_and_no_other_one_has_what_tells_how_layers_began(every, more, first):
    probe = trained(every, steps=5, **more)
    found = {m.step: {"weight_natural", "drift_ratio"} & set(m.values) for m in probe.measurements}
    assert min(found) == first
    assert found.pop(first) == (set() if "quantities" in more else {"weight_natural", "drift_ratio"})
    assert not any("drift_ratio" in keys for keys in found.values())


def seen(*measurements):
    """Whether layers waited, after each; the judge is saved and loaded in between."""
    waits, state = [], None
    for measurement in measurements:
        judge = Judge(SpectralCondition())
        if state:
            judge.load_state_dict(json.loads(json.dumps(state)))
        judge.judge(measurement)
        waits.append(bool(judge.waits))
        state = judge.state_dict()
    return waits


def grown(step, ratio, size=0.1):
    """The readout has this size, and the step changed it by this part of it; 0 before the first step."""
    reasons = {} if ratio < math.inf else {"update_ratio/head": ZERO}
    ratio = ratio if ratio < math.inf else math.nan
    return measured(step, weight_natural={"head": size}, update_ratio={"head": ratio}, reasons=reasons, **FAST)


def test_layers_wait_until_a_step_changes_it_by_less_than_a_quarter_of_its_size():
    steps = [grown(1, math.inf), grown(2, 1.0), grown(3, 0.5), grown(4, 0.26), grown(5, 0.24), grown(6, 0.24)]
    assert seen(*steps) == [True] * 4 + [False] * 2
    steps = [grown(1, math.inf), grown(2, 0.24), grown(3, 0.9)]
    assert seen(*steps) == [True, False, False], "once it has grown it has"


def test_weights_of_zero_say_so_themselves():
    only = ["update_natural", "weight_natural"]
    first = measured(1, only=only, weight_natural={"head": 0.0})
    assert seen(first, grown(2, 0.5), grown(3, 0.1)) == [True, True, False]


def test_drift_may_say_so_later():
    late = measured(2, only=["drift_ratio"], drift_ratio=nothing("head"), reasons={"drift_ratio/head": ZERO})
    assert seen(grown(1, 0.9), late, grown(3, 0.5), grown(4, 0.2)) == [False, True, True, False]


def test_growing_is_waited_for_twelve_measurements_at_most():
    steps = [grown(1, math.inf), *[grown(step, 0.9) for step in range(2, 20)]]
    assert seen(*steps) == [True] * 12 + [False] * 7


def test_what_has_no_size_and_no_steps_is_waited_for_as_long():
    reasons = {"drift_ratio/head": ZERO}
    only = {"only": ["update_natural", "drift_ratio"], "drift_ratio": nothing("head"), "reasons": reasons}
    assert seen(*[measured(step, **only) for step in range(1, 20)]) == [True] * 12 + [False] * 7


def test_what_stays_at_zero_is_waited_for_four_measurements():
    stuck = {"weight_natural": {"head": 0.0}, "update_natural": {"head": 0.0}, "update_ratio": nothing("head")}
    steps = [measured(step, reasons={"update_ratio/head": ZERO}, **stuck) for step in range(1, 10)]
    assert seen(*steps) == [True] * 4 + [False] * 5


def test_measurements_before_the_first_learning_rate_do_not_count():
    """A schedule that begins with twenty steps at 0."""
    zero = {"lr": dict.fromkeys(LAYERS, 0.0), "weight_natural": {"head": 0.0}, "update_ratio": nothing("head")}
    before = [measured(step, reasons={"update_ratio/head": ZERO}, **zero) for step in range(1, 21)]
    assert seen(*before, grown(21, math.inf), grown(22, 0.9), grown(23, 0.1))[-3:] == [True, True, False]


def test_weights_that_are_zero_again_later_excuse_nothing():
    measurements = [grown(step, 0.05, 0.5) for step in range(1, 21)] + [grown(21, 0.05, 0.0), grown(22, 0.05, 0.0)]
    assert not any(seen(*measurements))


def test_what_is_below_a_readout_that_began_at_zero_is_healthy_while_that_grows():
    """Then layers are compared, and one of which still nothing arrives is dead."""
    judge, zero = Judge(SpectralCondition()), {"a": 0.0}
    for step in range(1, 9):
        late = measured(
            step,
            contribution=zero,
            reasons={"update_ratio/head": ZERO} if step == 1 else {},
            update_ratio={"head": math.nan if step == 1 else 0.9},
        )
        assert judge.judge(late) == ()
        assert judge.waits == "head began at zero and is still growing"
    assert not judge.judge(measured(9, contribution=zero, update_ratio={"head": 0.1}))
    assert [verdict.layer for verdict in judge.judge(measured(10, contribution=zero))] == ["a"]


def test_behind_a_gain_that_has_left_zero_what_gets_no_gradient_is_dead():
    """A sparse autoencoder whose ReLUs never open, with a bias ahead of them that begins at zero and stays small."""
    torch.manual_seed(0)

    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc, self.dec = nn.Linear(16, 32), nn.Linear(32, 16, bias=False)
            self.b = nn.Parameter(torch.zeros(16))
            nn.init.constant_(self.enc.bias, -50.0)

        def forward(self, x):
            return self.dec(torch.relu(self.enc(x - self.b))) + self.b

    net = Sparse()
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    probe = SpectralProbe(net, optimizer, every_n_steps=1)
    told = []
    for _ in range(10):
        x = torch.rand(64, 16)
        with training_step(probe, optimizer):
            (net(x) - x).square().mean().backward()
        told.append({verdict.cause for verdict in probe.latest.verdicts})
    assert net.b.abs().max() < GROWN
    assert told[:STUCK] == [set()] * STUCK
    assert told[-1] == {"dead"}


def test_while_it_grows_faults_that_compare_nothing_are_still_named():
    """A learning rate stands out, and a step is as large as the weights, whatever the readout does."""
    judge = Judge(SpectralCondition())
    first = measured(1, lr={"b": 1.0}, reasons={"update_ratio/head": ZERO}, update_ratio=nothing("head") | {"c": 6.0})
    verdicts = judge.judge(first)
    assert {verdict.layer: verdict.cause for verdict in verdicts} == {"b": "lr_too_large", "c": "exploding"}
    assert judge.waits


def test_the_first_step_of_what_began_at_zero_is_as_large_as_itself_and_no_explosion():
    judge = Judge(SpectralCondition())
    judge.judge(measured(1, weight_natural={"head": 0.0}, update_ratio=nothing("head")))
    for step, ratio in enumerate((8.0, 4.0, 2.0, 1.0, 0.2, 9.0), 2):
        assert judge.judge(measured(step, update_ratio={"head": ratio})) == ()


def test_a_matrix_that_begins_to_grow_late_is_excused_while_it_does():
    """The readout began at zero too, so that no gradient arrived at first."""
    judge, reasons = Judge(SpectralCondition()), {"drift_ratio/c": ZERO}
    for step, size in enumerate((0.0, 0.0, 0.1, 0.2, 0.3, 0.4, 0.5), 1):
        update = {"update_ratio": {"c": 1.0}, "update_natural": {"c": 0.1 if size else 0.0}}
        given = measured(step, weight_natural={"c": size}, reasons=reasons, drift_ratio=nothing("c"), **update)
        assert judge.judge(given) == ()


def test_a_layer_that_stays_at_zero_is_not_excused_for_ever():
    zeroed = {"weight_natural": {"b": 0.0}, "update_natural": {"b": 0.0}, "contribution": {"b": 0.0}}
    reasons = {"update_ratio/b": ZERO}
    judge = Judge(SpectralCondition())
    seen = [judge.judge(measured(s, reasons=reasons, update_ratio=nothing("b"), **zeroed)) for s in range(1, 9)]
    assert [len(verdicts) for verdicts in seen] == [0] * 5 + [1] * 3
    assert (seen[-1][0].layer, seen[-1][0].cause) == ("b", "dead_input")


@pytest.mark.parametrize(("before", "waits"), [(GRACE - 1, True), (GRACE, False)])
def test_what_is_zero_later_than_that_did_not_begin_so(before, waits):
    gate = ZeroStartGate()
    for step in range(1, before + 2):
        zero = {"weight_natural": {"head": 0.0}, "update_ratio": nothing("head")} if step > before else {}
        measurement = measured(step, **zero)
        gate.look(measurement, Network.read(measurement, columns(measurement), set_by()))
    assert bool(gate.reason) is waits


def test_an_embedding_that_began_at_zero_has_no_scale_to_mend():
    judge, small = Judge(SpectralCondition()), {"weight_natural": {"tok": 0.001}}
    for step in range(1, 9):
        begun = {"weight_natural": {"tok": 0.0}, "update_ratio": nothing("tok")} if step == 1 else small
        assert not judge.judge(measured(step, **begun, reasons={"update_ratio/tok": ZERO} if step == 1 else {}))
    other = Judge(SpectralCondition())
    found = [other.judge(measured(step, **small)) for step in range(1, 9)]
    assert [verdict.cause for verdict in found[-1]] == ["embedding_scale"], "one that did not has"


class Aligner(nn.Module):
    """Classifies what a small network has moved; its last layer begins at zero, as in a spatial transformer."""

    def __init__(self):
        super().__init__()
        self.where = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
        self.what = nn.Sequential(
            *(part for _ in range(4) for part in (nn.Linear(32, 32), nn.ReLU())), nn.Linear(32, 8)
        )
        nn.init.zeros_(self.where[-1].weight)

    def forward(self, x):
        return self.what(x + self.where(x))


def aligned(lr, steps=64):
    """An aligner under SGD, and what was found about it; the layers before the zero move late."""
    torch.manual_seed(0)
    model = Aligner()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    probe = SpectralProbe(model, optimizer, mode="observe")
    teacher = torch.randn(32, 8)
    for _ in range(steps):
        x = torch.randn(64, 32)
        with training_step(probe, optimizer):
            nn.functional.cross_entropy(model(x), (x @ teacher).argmax(1)).backward()
    return {verdict.cause for measurement in probe.measurements for verdict in measurement.verdicts}


def test_layers_behind_a_matrix_that_began_at_zero_may_move_late():
    assert not aligned(0.3)
    assert "rates_too_small" in aligned(0.0003)


HELD = {"contribution": {"a": 0.0}, "update_natural": {"a": 0.0}, "weight_natural": {"c": 0.0}}


@pytest.mark.parametrize(("first", "named"), [(HELD, False), ({}, True)])
def test_which_layers_move_late_is_part_of_the_state(first, named):
    late = {"update_natural": {"a": 1e-4}, "drift_ratio": {"a": 1e-3}}
    judge = Judge(SpectralCondition())
    judge.judge(measured(1, **first))
    state = json.loads(json.dumps(judge.state_dict()))
    judge = Judge(SpectralCondition())
    judge.load_state_dict(state)
    verdicts = [judge.judge(measured(step, **late)) for step in (2, 4, 8, 16)]
    assert any(verdict.cause == "vanishing" for verdict in verdicts[-1]) == named


@pytest.mark.parametrize(("pace", "told"), [(0.05, []), (1e-4, ["rates_too_small"])])
def test_gains_that_stay_next_to_zero_do_not_hide_small_steps_of_other_layers(pace, told):
    """Three matrices of four are in branches that end with a gain of 0, as in many ResNets, and take tiny steps."""
    layers = {**LAYERS, "gain": LayerInfo("gain", "vector", 1, 64, (64,))}
    inside = ("a", "b", "c")
    pace_of = dict.fromkeys(layers, pace) | dict.fromkeys(inside, 1e-6)
    steps = {"update_natural": pace_of, "update_ratio": pace_of}
    held_back = {"contribution": dict.fromkeys(inside, 0.0), "weight_natural": {"gain": 0.0}, **steps}
    later = {"weight_natural": {"gain": 0.01}, **steps}
    judge, verdicts = Judge(SpectralCondition()), ()
    for step in (1, 2, 4, 8, 16, 32, 64, 100, 128):
        state = json.loads(json.dumps(judge.state_dict()))
        judge = Judge(SpectralCondition())
        judge.load_state_dict(state)
        verdicts = judge.judge(measured(step, layers=layers, **(held_back if step == 1 else later)))
        assert judge.waits.startswith("gain began at zero")
    assert [verdict.cause for verdict in verdicts] == told
