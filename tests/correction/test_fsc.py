"""Policy "fsc": every block of parameters takes the same part of the decrease, all together the learning rate or, as
Polyak would have it, the part of the loss that can be gained."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
import torch
from torch import nn

from spectral_monitor import LRCorrection, Measurement, SpectralLRCorrector, SpectralMonitorWarning, SpectralProbe
from spectral_monitor.correction.corrector import Corrector
from spectral_monitor.correction.update_size import block_contributions
from spectral_monitor.layers import dissect
from spectral_monitor.parametrization.tying import contribution_blocks
from spectral_monitor.scaling import calibrate
from tests.one_step import training_step

LR, WORDS, WIDTH = 0.005, 11, 24


class Language(nn.Module):
    """Returns its loss. ``scale`` stands alone; ``shift`` does nothing, for softmax takes no notice of it."""

    def __init__(self, tied=False):
        super().__init__()
        torch.manual_seed(0)
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(1))
        self.tokens, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(6, WIDTH)
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down, self.head = nn.Linear(2 * WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WORDS)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids, targets):
        x = (self.tokens(ids) + self.places(torch.arange(ids.shape[1]))) * self.scale
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        logits = self.head(x) / WIDTH**0.5 + self.shift
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


BLOCKS = [
    {"scale"},
    {"shift"},
    {"tokens"},
    {"places"},
    {"norm.weight", "norm.bias"},
    {"up", "up.bias"},
    {"down"},
    {"head", "head.bias"},
]


def batch(step=0):
    g = torch.Generator().manual_seed(step)
    ids = torch.randint(WORDS, (32, 6), generator=g)
    return ids, (3 * ids + 1) % WORDS


def train(network, steps, **settings):
    """Plain gradient descent under fsc; what the last step took off the loss, and contributions without the package."""
    optimizer = torch.optim.SGD(network.parameters(), lr=LR)
    rule = LRCorrection("fsc", **settings)
    probe = SpectralProbe(
        network, optimizer, every_n_steps=1, quantities=rule.quantities, correction=rule, mode="correct"
    )
    for _ in range(steps):
        before = {name: p.detach().clone() for name, p in network.named_parameters()}
        with training_step(probe, optimizer):
            loss = network(*batch())
            loss.backward()
            gradients = {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}
    after = dict(network.named_parameters())
    shares = defaultdict(float)
    for name, gradient in gradients.items():
        shares[name.removesuffix(".weight").removesuffix(".bias")] -= float(
            (gradient.double() * (after[name].detach() - before[name]).double()).sum()
        )
    return probe, dict(shares), loss.item()


def test_blocks():
    layers = dissect(Language()).layers
    found = [{layers[i].info.name for i in block.members} for block in contribution_blocks(layers)]
    assert found == BLOCKS
    tied = dissect(Language(tied=True)).layers
    together = [{tied[i].info.name for i in block.members} for block in contribution_blocks(tied)]
    assert {"tokens", "head"} in together, "they have one gradient"
    assert {"head.bias"} in together
    assert len(together) == len(BLOCKS)


def test_where_modules_have_parts_or_several_matrices_parameters_stand_alone():
    layers = dissect(nn.ModuleDict({"a": nn.MultiheadAttention(8, 2), "r": nn.LSTM(4, 4)})).layers
    assert all(
        not block.followers or "out_proj" in layers[block.leader].info.name for block in contribution_blocks(layers)
    )


def test_they_are_those_of_calibrate():
    network = Language()
    network.shift.requires_grad_(False)
    found = calibrate(network, [batch()])
    blocks = {frozenset(name.removesuffix(".weight") for name in names) for names in found.parameters.values()}
    assert blocks == {
        frozenset({"norm", "norm.bias"}) if "norm.bias" in b else frozenset(b) for b in BLOCKS if "shift" not in b
    }


@pytest.mark.parametrize("tied", [False, True])
def test_all_blocks_contribute_alike_and_together_the_learning_rate(tied):
    network = Language(tied)
    _, shares, _ = train(network, 40)
    count = len(BLOCKS) - 1
    assert abs(shares.pop("shift")) < 1e-9
    assert len(shares) == count
    assert list(shares.values()) == pytest.approx([LR / count] * count, rel=0.1)
    assert sum(shares.values()) == pytest.approx(LR, rel=0.05)


def test_one_measurement_tells_the_multipliers():
    """At the same gradient, contributions would then be equal, exactly; what stands in softmax alone is left alone."""
    probe, shares, _ = train(Language(), 1)
    del shares["shift"]
    assert probe.multipliers["shift"] == 0.01
    for name, share in shares.items():
        multiplier = probe.multipliers["norm.weight" if name == "norm" else name]
        assert share * multiplier / 0.01 == pytest.approx(LR / 7, rel=1e-3), name


def test_frozen_blocks_are_not_counted():
    network = Language()
    network.tokens.requires_grad_(False)
    network.up.weight.requires_grad_(False)
    _, shares, _ = train(network, 40)
    del shares["shift"]
    assert set(shares) == {"scale", "places", "norm", "up", "down", "head"}
    assert list(shares.values()) == pytest.approx([LR / 6] * 6, rel=0.1)


def test_a_block_is_corrected_by_what_is_trained_of_it():
    """Its matrix is frozen, and in no optimizer; the bias beside it is trained."""
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    network[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in network.parameters() if p.requires_grad], lr=LR)
    layers, rule = dissect(network).layers, LRCorrection("fsc")
    corrector = Corrector(rule, layers, [optimizer])
    before = corrector.multipliers["0.bias"]
    values = {key: torch.full((len(layers),), LR, dtype=torch.float64) for key in rule.quantities}
    values["lr"][0] = values["lr_multiplier"][0] = values["contribution"][0] = math.nan
    changes = corrector.update(Measurement(1, tuple(layer.info for layer in layers), values, {}))
    assert {change.layer for change in changes} == {"0", "1"}
    assert corrector.multipliers["0.bias"] != before


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("floor", [0.0, 1.0])
def test_polyak_goes_by_what_can_be_gained(floor):
    network = Language()
    losses = []
    for steps in (30, 60):
        probe, shares, loss = train(network, steps, polyak=floor)
        assert probe.latest.summary["loss"] == pytest.approx(loss, rel=1e-5)
        del shares["shift"]
        assert sum(shares.values()) == pytest.approx(LR * (loss - floor), rel=0.1)
        losses.append(loss)
    assert losses[1] < losses[0] - 0.3
    assert losses[1] > floor


def test_polyak_stays_where_it_is_below_its_floor():
    probe, _, _ = train(Language(), 10, polyak=50.0)
    assert set(probe.multipliers.values()) == {0.01}


def test_a_loss_that_is_at_its_floor_asks_for_nothing():
    network = Language()
    rule = LRCorrection("fsc", polyak=0.5)
    corrector = Corrector(rule, dissect(network).layers, [torch.optim.SGD(network.parameters(), lr=LR)])
    layers = tuple(layer.info for layer in dissect(network).layers)
    values = {key: torch.full((len(layers),), LR) for key in rule.quantities}
    before = corrector.multipliers
    assert corrector.update(Measurement(1, layers, values, {"loss": 0.5})) == []
    assert corrector.multipliers == before
    assert corrector.update(Measurement(2, layers, values, {"loss": 0.7}))


def test_contributions_of_rounding_are_squares_of_ten_times_eps():
    layers = dissect(nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))).layers
    least = (10 * torch.finfo(torch.float32).eps) ** 2
    rates = [1.0, 1e-3, 1e3, 1.0]  # sizes are for each unit of learning rate
    sizes = torch.tensor([1.0, 1.05 * least, 0.95 * least, 1e3 * least], dtype=torch.float64) * torch.tensor(rates)
    values = {"contribution": sizes, "update_fro": torch.ones(4), "weight_fro": torch.ones(4)}
    measurement = Measurement(1, tuple(layer.info for layer in layers), values, {})
    found = block_contributions(measurement, layers, contribution_blocks(layers), rates)
    assert [math.isnan(x) for x in found] == [False, False, True, False]


def test_blocks_that_nothing_moves_have_no_contribution():
    layers = dissect(nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))).layers
    values = {"contribution": torch.ones(3), "update_fro": torch.ones(3), "weight_fro": torch.ones(3)}
    measurement = Measurement(1, tuple(layer.info for layer in layers), values, {})
    found = block_contributions(measurement, layers, contribution_blocks(layers), [0.1, 0.0, math.nan])
    assert [math.isnan(x) for x in found] == [False, True, True]


def test_a_block_that_works_against_the_others_keeps_its_rate():
    """Momentum may carry it up the hill."""
    network = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    layers = dissect(network).layers
    rule = LRCorrection("fsc")
    corrector = Corrector(rule, layers, [torch.optim.SGD(network.parameters(), lr=LR)])
    before = corrector.multipliers
    values = {key: torch.ones(3) for key in rule.quantities} | {"lr": torch.full((3,), LR)}
    values["contribution"] = torch.tensor([1e-3, -1e-3, 1e-3])
    corrector.update(Measurement(1, tuple(layer.info for layer in layers), values, {}))
    assert {name for name, value in corrector.multipliers.items() if value != before[name]} == {"0", "2"}


def test_polyak_says_where_the_loss_is_not_known():
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(network.parameters(), lr=LR)
    rule = LRCorrection("fsc", polyak=0.0)
    probe = SpectralProbe(
        network, optimizer, every_n_steps=1, quantities=rule.quantities, correction=rule, mode="correct"
    )
    said = pytest.warns(SpectralMonitorWarning, match="not corrected .*polyak needs the loss; ")
    with said, probe.step():
        network(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()
    assert set(probe.multipliers.values()) == {0.01}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"policy": "target", "polyak": 0.0}, "polyak needs policy \"fsc\", got 'target'"),
        (
            {"policy": "fsc", "polyak": math.nan},
            "polyak must be a number, the lowest loss that can be reached; got nan",
        ),
        ({"policy": "fsc", "polyak": True}, "got True"),
    ],
)
def test_impossible_settings_are_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        LRCorrection(**arguments)


def test_few_samples_do_not_tell_the_loss():
    network = Language()
    optimizer = torch.optim.SGD(network.parameters(), lr=LR)
    with pytest.raises(ValueError, match="set replay_samples=None, got 8"):
        SpectralProbe(
            network,
            optimizer,
            every_n_steps=1,
            replay_samples=8,
            correction=LRCorrection("fsc", polyak=0.0),
            mode="correct",
        )
    assert SpectralLRCorrector("fsc", polyak=0.0).settings.replay_samples is None
    assert SpectralLRCorrector("fsc").settings.replay_samples == "auto"


def test_gains_in_half_precision_keep_their_rate():
    """What is left of their updates is rounding, and there is no norm that tells."""
    network = Language().to(torch.bfloat16)
    probe, _, _ = train(network, 10)
    assert {probe.multipliers[name] for name in ("scale", "norm.weight", "norm.bias")} == {1.0}
    assert all(probe.multipliers[name] != 1.0 for name in ("up", "up.bias", "down", "head", "tokens"))


@pytest.mark.parametrize("known", [1, 2, 3])
def test_blocks_that_are_known_share_the_decrease(known):
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    layers = dissect(network).layers
    corrector = Corrector(LRCorrection("fsc"), layers, [torch.optim.SGD(network.parameters(), lr=0.1)])
    measurement = Measurement(1, tuple(layer.info for layer in layers), {}, {})
    seen = [0.1] * known + [math.nan] * (3 - known)
    found = corrector.wanted.per_rates(
        measurement, corrector._leaders, corrector._multipliers, seen, [0.1] * 3, [1.0] * 3
    )
    assert found == pytest.approx([1 / known] * 3)
