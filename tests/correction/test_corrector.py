"""Multipliers of real networks: what each policy reaches, what moves nothing, what goes on after a stop."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from spectral_monitor import LRCorrection, SpectralCondition, SpectralMonitorWarning, SpectralProbe
from spectral_monitor.anatomy import dissect
from spectral_monitor.correction.corrector import PIXELS, SHARES
from spectral_monitor.correction.units import units

LR = 0.05


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places, self.other = nn.Embedding(40, 72), nn.Embedding(9, 72), nn.Embedding(9, 8)
        self.hidden, self.readout = nn.Linear(80, 72), nn.Linear(72, 40, bias=False)
        self.readout.weight = self.tokens.weight

    def forward(self, ids):
        place = torch.arange(ids.shape[1]) + torch.zeros_like(ids)
        x = torch.cat([self.tokens(ids) + self.places(place), self.other(place)], -1)
        return self.readout(self.hidden(x).tanh())


def perceptron(width=96):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(70, width), nn.ReLU(), nn.Linear(width, 80), nn.ReLU(), nn.Linear(80, 5))


def batch(step, network):
    g = torch.Generator().manual_seed(step)
    if isinstance(network, Tied):
        return torch.randint(40, (16, 9), generator=g)
    return torch.randn(64, 70, generator=g)


def train(network, optimizer, probe, steps, first=0, rate=lambda step: LR):
    for step in range(first, first + steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        with probe.step():
            optimizer.zero_grad()
            network(batch(step, network)).logsumexp(-1).mean().backward()
            optimizer.step()


EVEN = SpectralCondition(band=(0.999, 1.001), persistence=1)


def correcting(policy, kind=torch.optim.Adam, network=None, condition=SpectralCondition(), **settings):
    network = perceptron() if network is None else network
    optimizer = kind(network.parameters(), lr=LR)
    rule = LRCorrection(policy, **settings)
    quantities = sorted({*rule.quantities, "update_natural"})
    probe = SpectralProbe(
        network,
        optimizer,
        quantities=quantities,
        condition=condition,
        correction=rule,
        mode="correct",
        tol=1e-4,
    )
    return network, optimizer, probe


def last(probe, quantity="update_natural"):
    return {info.name: float(v) for info, v in zip(probe.latest.layers, probe.latest.values[quantity], strict=True)}


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD], ids=lambda k: k.__name__)
def test_target_is_the_learning_rate_in_natural_units(kind):
    network, optimizer, probe = correcting("target", kind)
    train(network, optimizer, probe, 40)
    shares = {"0": math.sqrt(70 / PIXELS), "2": 1.0, "4": 1.0, **{f"{i}.bias": SHARES["vector"] for i in (0, 2, 4)}}
    for name, size in last(probe).items():
        assert size == pytest.approx(LR * shares[name], rel=0.35), name
    assert max(last(probe).values()) / min(last(probe).values()) > 100, "biases are far from weights"


def test_target_counts_taps_by_their_root():
    torch.manual_seed(0)
    network = nn.Sequential(
        *(nn.Conv1d(2, 72, 5, padding=2), nn.ReLU(), nn.Conv1d(72, 72, 3, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(72 * 35, 72), nn.ReLU(), nn.Linear(72, 5)),
    )
    optimizer = torch.optim.Adam(network.parameters(), lr=LR)
    probe = SpectralProbe(network, optimizer, quantities="light", correction=LRCorrection("target"), mode="correct")
    for step in range(40):
        with probe.step():
            optimizer.zero_grad()
            network(batch(step, None).view(64, 2, 35)).logsumexp(-1).mean().backward()
            optimizer.step()
    wanted = {"0": math.sqrt(2 * 5 / PIXELS) * math.sqrt(5), "2": math.sqrt(3), "5": 1.0, "7": 1.0}
    for name, share in wanted.items():
        assert last(probe)[name] == pytest.approx(LR * share, rel=0.35), name
    middle = float(probe.latest.bands["update_natural"][dict(zip("0257", range(0, 8, 2), strict=True))["5"], 2])
    for name, place in zip("0257", range(0, 8, 2), strict=True):
        reference = float(probe.latest.bands["update_natural"][place, 2])
        assert reference == pytest.approx(middle * wanted[name], rel=1e-5), "they are held against that too"


def test_balance_with_no_band_evens_out():
    network, optimizer, probe = correcting("balance", torch.optim.SGD, condition=EVEN)
    train(network, optimizer, probe, 1)
    before = [last(probe)[name] for name in "024"]
    train(network, optimizer, probe, 40, 1)
    after = [last(probe)[name] for name in "024"]
    assert max(before) / min(before) > 3
    assert max(after) / min(after) < 1.4
    assert sorted(probe.multipliers[name] for name in "024")[1] == pytest.approx(1, rel=0.5)
    assert {probe.multipliers[f"{name}.bias"] for name in "024"} == {1.0}


def test_fsc_evens_out_contributions():
    network, optimizer, probe = correcting("fsc", torch.optim.SGD)
    train(network, optimizer, probe, 60)
    shares = last(probe, "contribution")
    assert [shares[name] for name in "024"] == pytest.approx([LR / 3] * 3, rel=0.4)


def test_a_profile_is_followed_by_a_wider_network(tmp_path):
    torch.manual_seed(0)
    narrow = perceptron(72)
    optimizer = torch.optim.Adam(narrow.parameters(), lr=LR / 10)
    probe = SpectralProbe(narrow, optimizer, quantities=["update_natural", "weight_natural", "lr"])
    train(narrow, optimizer, probe, 40, rate=lambda step: LR / 10)
    probe.save_profile(tmp_path / "narrow.json")
    wanted = {name: last(probe)[name] for name in "024"}
    network, optimizer, wide = correcting("reference", network=perceptron(640), reference=str(tmp_path / "narrow.json"))
    train(network, optimizer, wide, 40, rate=lambda step: LR / 10)
    assert {name: last(wide)[name] for name in "024"} == pytest.approx(wanted, rel=0.35)
    assert wide.multipliers["2"] < 0.6, "it had to be held back"


def test_a_schedule_does_not_move_multipliers():
    """The learning rate is divided by 100 halfway; what is asked for is in proportion."""
    network, optimizer, probe = correcting("target", torch.optim.SGD)
    train(network, optimizer, probe, 40)
    before = dict(probe.multipliers)
    train(network, optimizer, probe, 5, 40, lambda step: LR / 100)
    for name, value in probe.multipliers.items():
        assert value == pytest.approx(before[name], rel=0.3), name


def test_no_learning_rate_moves_nothing():
    network, optimizer, probe = correcting("target")
    train(network, optimizer, probe, 4, rate=lambda step: 0.0)
    first = dict(probe.multipliers)
    weights = [p.clone() for p in network.parameters()]
    train(network, optimizer, probe, 4, 4, lambda step: 0.0)
    assert probe.multipliers == first
    assert all(torch.equal(p, q) for p, q in zip(network.parameters(), weights, strict=True))


def test_nan_zero_and_mere_decay_move_nothing():
    network = perceptron()
    network[2].weight.requires_grad_(True)
    network[2].register_full_backward_hook(lambda *args: None)
    optimizer = torch.optim.AdamW(network.parameters(), lr=LR, weight_decay=0.5)
    rule = LRCorrection("target")
    probe = SpectralProbe(network, optimizer, quantities=rule.quantities, correction=rule, mode="correct")
    first = dict(probe.multipliers)
    spoil = {"0.weight": math.nan, "2.weight": 0.0, "4.weight": math.inf}
    for name, p in network.named_parameters():
        if name in spoil:
            p.register_hook(lambda grad, value=spoil[name]: torch.full_like(grad, value))
    train(network, optimizer, probe, 1)
    assert {name: probe.multipliers[name] for name in "024"} == {name: first[name] for name in "024"}
    assert last(probe)["2"] > 0, "the decay did move it"
    assert probe.multipliers["0.bias"] != first["0.bias"]


def test_updates_lost_in_rounding_move_nothing():
    network, optimizer, probe = correcting("target", torch.optim.SGD)
    train(network, optimizer, probe, 3, rate=lambda step: 1e-9)
    assert {probe.multipliers[name] for name in "024"} == {0.01}


def test_limits_hold():
    network, optimizer, probe = correcting("target", torch.optim.SGD, limits=(0.5, 2.0))
    train(network, optimizer, probe, 10)
    found = probe.multipliers.values()
    assert (min(found), max(found)) == (0.5, 2.0)


def test_tied_weights_and_what_is_added_to_them_share_one_multiplier():
    torch.manual_seed(0)
    network, optimizer, probe = correcting("target", network=Tied())
    layers = probe.anatomy.layers
    names = [layer.info.name for layer in layers]
    shared = [{names[i] for i in unit.members} for unit in units(layers) if unit.followers]
    assert shared == [{"readout", "tokens", "places"}]
    train(network, optimizer, probe, 30)
    m = probe.multipliers
    assert m["tokens"] == m["places"] == m["readout"] != m["other"]
    assert last(probe)["readout"] == pytest.approx(SHARES["tied"] * LR, rel=0.35)


class TiedThrice(nn.Module):
    """As encoders with decoders are: one table for both and for the readout, and a second stream of its own."""

    def __init__(self):
        super().__init__()
        self.shared, self.encoder, self.decoder = (nn.Embedding(40, 72) for _ in range(3))
        self.places, self.other = nn.Embedding(9, 72), nn.Embedding(9, 8)
        self.hidden, self.readout = nn.Linear(72, 72), nn.Linear(72, 40, bias=False)
        self.encoder.weight = self.decoder.weight = self.readout.weight = self.shared.weight


@pytest.mark.parametrize("excluded", [[], ["shared"], ["readout"]])
def test_every_layer_and_every_parameter_is_in_one_unit(excluded):
    layers = dissect(TiedThrice(), exclude=excluded).layers
    found = units(layers)
    assert sorted(i for unit in found for i in unit.members) == list(range(len(layers)))
    owners = [{id(p) for i in unit.members for p in layers[i].sources} for unit in found]
    assert sum(map(len, owners)) == len(set.union(*owners))
    (stream,) = [unit for unit in found if unit.followers]
    names = {layers[i].info.name for i in stream.members}
    if "readout" in excluded:
        assert names == {"shared", "encoder", "decoder"}, "positions are on their own then"
    else:
        assert names == {"shared", "encoder", "decoder", "places", "readout"} - set(excluded)
        assert layers[stream.leader].info.name == "readout"


def test_only_measured_weights_are_rescaled():
    torch.manual_seed(0)
    network = perceptron()
    before = [p.clone() for p in network.parameters()]
    rule = LRCorrection("target", spectral_init=2.0)
    probe = SpectralProbe(
        network,
        torch.optim.SGD(network.parameters(), lr=LR),
        quantities=rule.quantities,
        exclude=["2*"],
        correction=rule,
        mode="correct",
    )
    assert all(torch.equal(p, q) for p, q in zip(network.parameters(), before, strict=True))
    with probe.step():
        pass
    changed = [not torch.equal(p, q) for p, q in zip(network.parameters(), before, strict=True)]
    assert changed == [True, False, False, False, True, False]
    for layer, fans in ((network[0], (70, 96)), (network[4], (80, 5))):
        assert float(torch.linalg.matrix_norm(layer.weight, 2)) * (fans[0] / fans[1]) ** 0.5 == pytest.approx(
            2, rel=2e-3
        )


def test_what_goes_wrong_in_judging_costs_the_verdicts_not_the_training(monkeypatch):
    network, optimizer, probe = correcting("target")

    def broken(*args):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr("spectral_monitor.condition.Judge.judge", broken)
    with pytest.warns(SpectralMonitorWarning, match="broken on purpose"):
        train(network, optimizer, probe, 2)
    assert len(probe.measurements) == 2
    assert "violations" not in probe.latest.summary


def test_going_on_is_as_if_nothing_had_happened():
    def fresh():
        return correcting("target", torch.optim.AdamW)

    network, optimizer, probe = fresh()
    train(network, optimizer, probe, 9)
    saved = copy.deepcopy((network.state_dict(), optimizer.state_dict(), probe.state_dict()))
    train(network, optimizer, probe, 9, 9)
    other, second, resumed = fresh()
    other.load_state_dict(saved[0])
    second.load_state_dict(saved[1])
    resumed.load_state_dict(saved[2])
    train(other, second, resumed, 9, 9)
    assert resumed.multipliers == probe.multipliers
    assert all(torch.equal(p, q) for p, q in zip(network.parameters(), other.parameters(), strict=True))
    assert len(optimizer.param_groups) == 1


def test_multipliers_of_another_policy_or_model_are_refused():
    state = correcting("target")[2].state_dict()
    for other in (correcting("balance")[2], correcting("target", network=Tied())[2]):
        with pytest.raises(ValueError, match="saved"):
            other.load_state_dict(state)


def test_effective_rates_are_shown():
    network, optimizer, probe = correcting("target")
    train(network, optimizer, probe, 3)
    used = last(probe, "lr_multiplier")
    assert last(probe, "lr") == pytest.approx({name: LR * m for name, m in used.items()})
    assert used != probe.multipliers, "those are for the next step"


def test_lbfgs_is_refused():
    network = perceptron()
    with pytest.raises(ValueError, match="LBFGS"):
        SpectralProbe(network, torch.optim.LBFGS(network.parameters()), quantities="light", mode="correct")


@pytest.mark.parametrize("policy", ["target", "balance"])
def test_a_measurement_is_of_the_multipliers_it_was_made_with(policy):
    """On a GPU numbers arrive when the next step is over: another correction may have come in between."""
    network, optimizer, probe = correcting(policy, condition=EVEN, gain=1.0, max_change=1e4)
    train(network, optimizer, probe, 2)
    corrector = probe._oversight._corrector
    found, then = corrector.multipliers, last(probe, "lr_multiplier")
    assert any(abs(then[name] / value - 1) > 0.2 for name, value in found.items())
    assert corrector.update(probe.latest) == []
    assert corrector.multipliers == found
