"""Multipliers of real networks: what each policy reaches, what moves nothing, what goes on after a stop."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from torch import nn

from spectral_monitor import LRCorrection, Measurement, SpectralCondition, SpectralMonitorWarning, SpectralProbe
from spectral_monitor.condition import save_profile
from spectral_monitor.correction.corrector import Corrector
from spectral_monitor.correction.multiplier import Change
from spectral_monitor.correction.policies import LARGEST_START, REFERENCE_INPUTS, SHARES, SIZE_POWERS, SMALLEST_START
from spectral_monitor.correction.wanted import TRIAL
from spectral_monitor.layers import dissect
from spectral_monitor.monitoring.correction_report import CorrectionReport, limits_reached
from spectral_monitor.parametrization.tying import units
from tests.one_step import training_step

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
        with training_step(probe, optimizer):
            network(batch(step, network)).logsumexp(-1).mean().backward()


def correcting(policy, kind=torch.optim.Adam, network=None, condition=SpectralCondition(), size="lr", **settings):
    network = perceptron() if network is None else network
    optimizer = kind(network.parameters(), lr=LR)
    rule = LRCorrection(policy, size=size, **settings)
    quantities = sorted({*rule.quantities, "update_natural"})
    probe = SpectralProbe(
        network,
        optimizer,
        every_n_steps=1,
        quantities=quantities,
        condition=condition,
        correction=rule,
        mode="correct",
        tol=1e-4,
    )
    return network, optimizer, probe


def last(probe, quantity="update_natural"):
    return {info.name: float(v) for info, v in zip(probe.latest.layers, probe.latest.values[quantity], strict=True)}


def share(network, name, role, data=1.0):
    """By a closed form, of the weights there are: exact natural norms, summed over the taps of a convolution."""
    weight = dict(network.named_parameters()).get(f"{name}.weight")
    if role == "vector":
        return SHARES[role]
    taps = weight.flatten(2).movedim(2, 0) if weight.ndim > 2 else weight[None]
    fan_out, fan_in = taps.shape[1:]
    norm = sum(float(torch.linalg.matrix_norm(tap.detach().double(), 2)) for tap in taps) * math.sqrt(fan_in / fan_out)
    norm = min(max(norm, SMALLEST_START[role]), LARGEST_START.get(role, math.inf))
    return SHARES[role] * norm ** SIZE_POWERS[role] * data


ROLES = {"0": "operator", "2": "operator", "4": "readout", **{f"{i}.bias": "vector" for i in (0, 2, 4)}}


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD], ids=lambda k: k.__name__)
def test_target_is_the_learning_rate_times_the_share(kind):
    network, optimizer, probe = correcting("target", kind)
    data = {"0": (70 / REFERENCE_INPUTS) ** 0.25}
    shares = {name: share(network, name, role, data.get(name, 1.0)) for name, role in ROLES.items()}
    train(network, optimizer, probe, 40)
    for name, size in last(probe).items():
        assert size == pytest.approx(LR * shares[name], rel=0.35), name
    assert max(last(probe).values()) / min(last(probe).values()) > 30, "biases are far from weights"


def test_target_counts_taps_as_the_weights_do():
    torch.manual_seed(0)
    network = nn.Sequential(
        *(nn.Conv1d(2, 72, 5, padding=2), nn.ReLU(), nn.Conv1d(72, 72, 3, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(72 * 35, 72), nn.ReLU(), nn.Linear(72, 5)),
    )
    optimizer = torch.optim.Adam(network.parameters(), lr=LR)
    rule = LRCorrection("target", size="lr")
    probe = SpectralProbe(network, optimizer, every_n_steps=1, quantities="light", correction=rule, mode="correct")
    data = {"0": (2 * 5 / REFERENCE_INPUTS) ** 0.25}
    wanted = {n: share(network, n, "readout" if n == "7" else "operator", data.get(n, 1.0)) for n in "0257"}
    for step in range(40):
        with training_step(probe, optimizer):
            network(batch(step, None).view(64, 2, 35)).logsumexp(-1).mean().backward()
    for name, of in wanted.items():
        assert last(probe)[name] == pytest.approx(LR * of, rel=0.35), name
    references = {
        n: float(probe.latest.bands["update_natural"][i, 2]) for n, i in zip("0257", range(0, 8, 2), strict=True)
    }
    for name in "02":
        ratio = references[name] / references["5"]
        assert ratio == pytest.approx(wanted[name] / wanted["5"], rel=0.02), "they are held against that too"


def test_fsc_evens_out_contributions():
    network, optimizer, probe = correcting("fsc", torch.optim.SGD)
    train(network, optimizer, probe, 60)
    shares = last(probe, "contribution")
    assert [shares[name] for name in "024"] == pytest.approx([LR / 3] * 3, rel=0.4)


def test_a_profile_is_followed_by_a_wider_network(tmp_path):
    torch.manual_seed(0)
    narrow = perceptron(72)
    optimizer = torch.optim.Adam(narrow.parameters(), lr=LR / 10)
    probe = SpectralProbe(narrow, optimizer, every_n_steps=1, quantities=["update_natural", "weight_natural", "lr"])
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
    probe = SpectralProbe(
        network, optimizer, every_n_steps=1, quantities=rule.quantities, correction=rule, mode="correct"
    )
    first = dict(probe.multipliers)
    spoil = {"0.weight": math.nan, "2.weight": 0.0, "4.weight": math.inf}
    for name, p in network.named_parameters():
        if name in spoil:
            p.register_hook(lambda grad, value=spoil[name]: torch.full_like(grad, value))
    train(network, optimizer, probe, 1)
    assert {name: probe.multipliers[name] for name in "024"} == {name: first[name] for name in "024"}
    assert last(probe)["2"] > 0, "the decay did move it"
    assert last(probe)["0.bias"] == pytest.approx(LR * SHARES["vector"], rel=0.3), "others are none the worse for it"


def test_updates_lost_in_rounding_move_nothing():
    network, optimizer, probe = correcting("target", torch.optim.SGD)
    train(network, optimizer, probe, 3, rate=lambda step: 1e-9)
    assert {probe.multipliers[name] for name in "024"} == {TRIAL}


def test_limits_hold():
    """Adam moves one entry alone, a ninth of the least that its updates ordinarily are."""
    network, optimizer, probe = correcting("target", limits=(0.5, 2.0))
    only = torch.zeros(80, 96)
    only[3, 5] = 1.0
    network[2].weight.register_hook(lambda grad: grad * only)
    high = 2.0 * share(network, "2", "operator") / math.sqrt(96)
    text = r"2: learning rates are held at the limit .*, should be .*: check that gradients reach .*; wider limits="
    with pytest.warns(SpectralMonitorWarning, match=text) as caught:
        train(network, optimizer, probe, 30)
    assert len(caught) == 1
    assert probe.multipliers["2"] == pytest.approx(high, rel=1e-2)


def test_changes_are_told_in_a_line():
    layers = dissect(network := perceptron()).layers
    measurement = Measurement(16, tuple(layer.info for layer in layers), {}, {})
    report = CorrectionReport(Corrector(LRCorrection(), layers, [torch.optim.Adam(network.parameters())]))
    small = Change("0", 1.0, 1.6, 0.1, 0.16, "update_natural")
    large = Change("2", 1.95, 0.928, 0.29, 0.138, "update_natural")
    sizes = "x 1.95 -> x 0.928 (the update size is 0.29, should be 0.14)"
    assert list(report.lines(measurement, [small, large])) == [
        f"step 16: 2 learning rates corrected; the largest change: 2 {sizes}"
    ]
    assert list(report.lines(measurement, [large])) == [f"step 16: 2: learning rate {sizes}"]


def test_at_the_limit_it_says_what_to_do():
    layers = dissect(perceptron()).layers
    measurement = Measurement(16, tuple(layer.info for layer in layers), {}, {})
    low, high = (
        limits_reached([Change("2", 1.0, 2.0, 0.1, aim, "update_natural", True)], measurement) for aim in (0.01, 0.4)
    )
    assert "(x 2), although the update size is 0.1, should be 0.01: find out why the gradients of these" in low
    assert "(x 2), although the update size is 0.1, should be 0.4: check that gradients reach all entries" in high
    assert all(text.endswith("; wider limits=(low, high) let the correction go further") for text in (low, high))


def test_a_bias_at_its_limit_is_no_warning():
    """Nobody can do anything about it: one entry of many has a gradient."""
    network, optimizer, probe = correcting("target", limits=(0.5, 2.0))
    only = torch.zeros(80)
    only[3] = 1.0
    network[2].bias.register_hook(lambda grad: 0.5 * grad * only)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpectralMonitorWarning)
        train(network, optimizer, probe, 30)
    assert probe.multipliers["2.bias"] == pytest.approx(2.0 * SHARES["vector"], rel=0.1), "it is held all the same"


def test_a_gradient_that_vanishes_drives_no_rate_beyond_the_limit():
    """Under optimizers whose updates are as large as gradients the lowest rate that was right is what counts."""
    network, optimizer, probe = correcting("target", torch.optim.SGD)
    network[2].weight.register_hook(lambda grad: grad * (1.0 if probe.steps < 5 else 1e-5))
    train(network, optimizer, probe, 30)
    lowest = min(float(m.values["lr_multiplier"][2]) for m in list(probe.measurements)[1:5])
    assert lowest * 16 < probe.multipliers["2"] <= 64 * lowest * (1 + 1e-6)


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
    assert last(probe)["readout"] == pytest.approx(math.sqrt(LARGEST_START["readout"]) * LR, rel=0.35), (
        "it began larger"
    )


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
        every_n_steps=1,
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
    for other in (
        correcting("balance")[2],
        correcting("target", network=Tied())[2],
        correcting("target", size=0.1)[2],  # whose multipliers are learning rates
    ):
        with pytest.raises(ValueError, match="saved"):
            other.load_state_dict(state)


def test_what_differs_is_named_up_to_six_layers():
    network = perceptron()
    optimizer = torch.optim.Adam(network.parameters(), lr=LR)
    corrector = Corrector(LRCorrection("target"), dissect(network).layers, [optimizer])
    state = corrector.state_dict()
    state["units"] = {f"layer {name}": row for name, row in state["units"].items()}
    with pytest.raises(ValueError, match=r"to other layers: 0, 0.bias, 2, 2.bias, 4, 4.bias$"):
        corrector.load_state_dict(state)


def test_effective_rates_are_shown():
    network, optimizer, probe = correcting("target")
    train(network, optimizer, probe, 3)
    used = last(probe, "lr_multiplier")
    assert last(probe, "lr") == pytest.approx({name: LR * m for name, m in used.items()})
    assert used != probe.multipliers, "those are for the next step"


def test_lbfgs_is_refused():
    network = perceptron()
    with pytest.raises(ValueError, match="LBFGS"):
        SpectralProbe(
            network, torch.optim.LBFGS(network.parameters()), every_n_steps=1, quantities="light", mode="correct"
        )


@pytest.mark.parametrize("policy", ["target", "fsc"])
def test_a_measurement_is_of_the_multipliers_it_was_made_with(policy):
    """On a GPU numbers arrive when the next step is over: another correction may have come in between."""
    network, optimizer, probe = correcting(policy)
    train(network, optimizer, probe, 2)
    corrector = probe._supervisor._corrector
    found, then = corrector.multipliers, last(probe, "lr_multiplier")
    assert any(abs(then[name] / value - 1) > 0.2 for name, value in found.items())
    corrector.update(probe.latest)
    for name, value in corrector.multipliers.items():
        assert value == pytest.approx(found[name], rel=0.2), "what is known of the updates is the same"


def test_a_profile_without_a_learning_rate_at_a_step_wants_nothing(tmp_path):
    network = perceptron()
    layers = dissect(network).layers
    infos = tuple(layer.info for layer in layers)
    values = {key: torch.ones(len(infos)) for key in ("update_natural", "weight_natural")}
    rates = {1: 0.1, 2: 0.0}
    steps = [Measurement(step, infos, values | {"lr": torch.full((len(infos),), lr)}, {}) for step, lr in rates.items()]
    save_profile(steps, tmp_path / "tuned.json")
    rule = LRCorrection("reference", reference=str(tmp_path / "tuned.json"))
    corrector = Corrector(rule, layers, [torch.optim.Adam(network.parameters(), lr=LR)])
    assert corrector.wanted._per_rate(layers[0], 1) == pytest.approx(10)
    assert math.isnan(corrector.wanted._per_rate(layers[0], 2))
