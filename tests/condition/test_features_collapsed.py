"""Networks that give nearly the same answer to all samples: inputs of many layers hardly differ."""

from __future__ import annotations

import math
import re
from itertools import pairwise

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from spectral_monitor import SpectralProbe
from spectral_monitor.condition import NETWORK, Judge, SpectralCondition
from spectral_monitor.condition.network import MIN_SPREAD, SPREADING_INPUTS
from spectral_monitor.condition.trends.pace import SETTLED
from tests.condition.synthetic import LAYERS, measured
from tests.condition.test_documented_limits import PAGE, is_off, numbers
from tests.one_step import training_step

COLLAPSED = "features_collapsed"


def inputs(**excess):
    """Stable ranks of inputs, so far above 1; those of other layers are 5."""
    return {"input_stable_rank": {name: 1 + excess.get(name, 4.0) for name in LAYERS}}


@pytest.mark.parametrize(("factor", "off"), [(0.99, True), (1.01, False)])
def test_the_limit_is_that_of_the_page(factor, off):
    line = next(line for line in PAGE.splitlines() if "`input_stable_rank` minus 1" in line)
    step, *_ = numbers(line)
    (limit,) = numbers(line.rpartition(" | ")[2])
    assert (step, limit) == (SETTLED, MIN_SPREAD)
    assert is_off(COLLAPSED, inputs(c=0.0, head=factor * limit), start=SETTLED) == off
    assert not is_off(COLLAPSED, inputs(c=0.0, head=0.0), start=SETTLED - 1)


def test_one_layer_in_three_must_be_given_the_same():
    assert not is_off(COLLAPSED, inputs(head=0.0), start=SETTLED)  # one of four
    few = {name: info for name, info in LAYERS.items() if name not in ("a", "b")}
    assert not is_off(COLLAPSED, inputs(c=0.0, head=0.0) | {"layers": few}, start=SETTLED)  # of two


def test_unknown_ranks_tell_nothing():
    assert not is_off(COLLAPSED, inputs(c=math.nan, head=math.nan, b=0.0), start=SETTLED)
    assert not is_off(COLLAPSED, {}, start=SETTLED)


TRAINED = {"weight_fro": dict.fromkeys(LAYERS, 1.2)}
"""With a spectral norm of 1 no random matrix is so small."""


def told(*changes, **changed):
    """The verdicts of this cause after each measurement."""
    judge = Judge(SpectralCondition())
    found = [judge.judge(measured(step, **change, **changed)) for step, change in enumerate(changes, SETTLED)]
    return [[verdict for verdict in some if verdict.cause == COLLAPSED] for some in found]


def test_evidence_adds_up_and_an_earlier_training_excuses():
    alike = inputs(b=0.0, c=1e-4, head=1e-6)
    found = told(*[alike] * 3)
    assert [len(some) for some in found] == [0, 1, 1]
    (verdict,) = found[-1]
    assert (verdict.layer, verdict.quantity, verdict.remedy.action) == (NETWORK, "input_stable_rank", "check")
    assert (
        "the inputs of 3 of 4 layers, from b on, differ between samples by less than 5 % of their size"
        in verdict.sentence
    )
    assert not any(told(*[alike] * 6, **TRAINED))


def test_steps_that_are_measured_without_features_do_not_count():
    alike = inputs(b=0.0, c=0.0, head=0.0)
    found = told(alike, {}, alike, {}, alike)
    assert [len(some) for some in found] == [0, 0, 1, 1, 1]


def digits():
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 8 - 1, torch.tensor(labels)


def train(activation, norm, depth=8, width=64, steps=64, lr=1e-3):
    torch.manual_seed(0)
    x, y = digits()
    blocks = [part for _ in range(depth) for part in (nn.Linear(width, width), norm(width), activation())]
    model = nn.Sequential(*blocks, nn.Linear(width, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr)
    said = []
    probe = SpectralProbe(model, optimizer, every_n_steps=8, on_verdict=said.append)
    for _ in range(steps):
        some = torch.randint(len(x), (64,))
        with training_step(probe, optimizer):
            nn.functional.cross_entropy(model(x[some]), y[some]).backward()
    return {verdict.cause for verdict in said}, probe.latest


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("activation", "norm", "expected"),
    [
        (nn.Sigmoid, nn.Identity, {COLLAPSED}),
        (nn.Sigmoid, nn.BatchNorm1d, set()),
        (nn.ReLU, nn.Identity, set()),
        (nn.Tanh, nn.LayerNorm, set()),
    ],
    ids=["sigmoids", "with norms", "ReLU", "tanh"],
)
def test_a_deep_network_of_sigmoids_gives_one_answer_to_all(activation, norm, expected):
    causes, latest = train(activation, norm)
    assert causes == expected
    if expected:
        (verdict,) = (root for root in latest.roots if root.cause == COLLAPSED)
        first = re.search(r"from (\d+) on", verdict.sentence)[1]
        assert latest.value("input_stable_rank", first) < 1 + MIN_SPREAD


@pytest.mark.parametrize(("dimensions", "expected"), [(1, set()), (SPREADING_INPUTS, {COLLAPSED})])
def test_features_of_coordinates_may_lie_along_a_line(dimensions, expected):
    """As in a network that solves a differential equation; the same number in eight places is no coordinate."""
    torch.manual_seed(0)
    sizes = (dimensions, 32, 32, 32)
    layers = [part for pair in pairwise(sizes) for part in (nn.Linear(*pair), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(32, 1))
    for part in model:
        if isinstance(part, nn.Linear):
            nn.init.zeros_(part.bias)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    probe = SpectralProbe(model, optimizer, every_n_steps=4)
    for _ in range(48):
        x = 2 * torch.rand(64, 1) - 1
        with training_step(probe, optimizer):
            (model(x.expand(-1, dimensions)) - torch.sin(3 * x)).square().mean().backward()
    assert min(probe.latest.value("input_stable_rank", name) for name in ("2", "4", "6")) < 1 + MIN_SPREAD
    assert {verdict.cause for verdict in probe.latest.verdicts} == expected


@pytest.mark.parametrize("rows", [1, 2])
def test_a_single_row_has_no_stable_rank(rows):
    """It would be 1, whatever the row: a network that is trained by single samples has not collapsed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    probe = SpectralProbe(model, optimizer, every_n_steps=1)
    x = torch.randn(rows, 8)
    with probe.step():
        model(x).square().mean().backward()
        optimizer.step()
    for key in ("input_stable_rank", "backward_stable_rank"):
        found = probe.latest.value(key, "0")
        assert math.isnan(found) == (rows == 1)
        assert probe.latest.why(key, "0") == ("always 1 with a single row" if rows == 1 else "")
    if rows > 1:
        sizes = torch.linalg.svdvals(x.double()).square()
        assert probe.latest.value("input_stable_rank", "0") == pytest.approx(float(sizes.sum() / sizes[0]), rel=1e-5)


def test_the_check_can_be_turned_off():
    judge = Judge(SpectralCondition(ignore=["features"]))
    alike = inputs(b=0.0, c=0.0, head=0.0)
    assert not [v for k in range(6) for v in judge.judge(measured(SETTLED + k, **alike)) if v.cause == COLLAPSED]
