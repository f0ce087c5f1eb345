"""Layers that an optimizer holds and no gradient ever reaches."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from spectral_monitor import SpectralProbe
from spectral_monitor.condition import Judge, SpectralCondition
from spectral_monitor.condition.network import Network
from spectral_monitor.condition.row import columns
from spectral_monitor.measurement import UNUSED
from tests.condition.synthetic import LAYERS, measured, nothing, set_by
from tests.one_step import training_step


class Net(nn.Module):
    """Three layers and a head; the first ``cut`` of them are detached, and some more layers are called for nothing."""

    def __init__(self, cut, spare=0):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.spare = nn.Sequential(*(nn.Linear(16, 16) for _ in range(spare)))
        self.head, self.cut = nn.Linear(16, 4), cut

    def forward(self, x):
        for k, layer in enumerate(self.layers):
            x = layer(x).relu()
            if k + 1 == self.cut:
                x = x.detach()
        self.spare(x)
        return self.head(x)


def causes(model, optimizer=None, steps=4):
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), 1e-3)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, mode="observe")
    generator, found = torch.Generator().manual_seed(0), []
    for _ in range(steps):
        with training_step(probe, optimizer):
            x = torch.randn(32, 16, generator=generator)
            nn.functional.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
        found.append({verdict.cause: set(verdict.layers) for verdict in probe.latest.roots})
    return found


def test_detached_layers_are_named_together_at_the_second_measurement():
    found = causes(Net(cut=2))
    assert found == [{}] + [{"dead": {"layers.0", "layers.1"}}] * 3


def test_a_single_layer_is_named_where_gradients_reach_those_in_equal_places():
    assert causes(Net(cut=1)) == [{}] + [{"dead": {"layers.0"}}] * 3
    alone = Net(cut=1)
    alone.layers[0] = nn.Linear(16, 16, bias=False)
    alone.layers[1] = nn.Linear(16, 24)
    alone.layers[2] = nn.Linear(24, 16)
    assert causes(alone) == [{}] * 4, "of a single layer it may be meant"


def test_nothing_is_said_of_a_network_that_is_whole_or_of_outputs_nobody_uses():
    assert causes(Net(cut=0)) == [{}] * 4
    assert causes(Net(cut=0, spare=2)) == [{}] * 4, "outputs are not used, as those of a pooler"


def test_layers_that_no_optimizer_holds_or_that_are_frozen_are_left_alone():
    model = Net(cut=2)
    assert causes(model, torch.optim.AdamW([*model.layers[2].parameters(), *model.head.parameters()], 1e-3)) == [{}] * 4
    model.layers[:2].requires_grad_(False)
    assert causes(model) == [{}] * 4


def test_a_gradient_that_comes_later_lifts_it():
    model = Net(cut=2)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    assert "dead" in causes(model, optimizer)[-1]
    probe = SpectralProbe(model, optimizer, every_n_steps=1, mode="observe")
    x = torch.randn(32, 16)
    for step in range(8):
        model.cut = 0 if step > 3 else 2
        with training_step(probe, optimizer):
            nn.functional.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
        assert ("dead" in {verdict.cause for verdict in probe.latest.verdicts}) == (1 <= step <= 3), step


def test_layers_that_have_moved_before_are_not_cut_off():
    """As where some are trained by turns."""
    model = Net(cut=0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, mode="observe")
    for step in range(6):
        model.cut = 2 if step else 0
        with training_step(probe, optimizer):
            model(torch.randn(32, 16)).square().mean().backward()
    assert not probe.latest.verdicts


class Towers(nn.Module):
    """A tower that is trained, and another one whose outputs are used, but detached."""

    def __init__(self, other):
        super().__init__()
        torch.manual_seed(0)
        self.query = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        self.other = other
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        with torch.no_grad():
            key = self.other(x)
        return self.head(self.query(x) * key)


def tower(*sizes):
    layers = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def test_a_tower_without_gradients_in_a_new_network_is_named():
    assert causes(Towers(tower(16, 24, 24, 16))) == [{}] + [{"dead": {"other.0", "other.2", "other.4"}}] * 3


def test_a_tower_that_is_small_is_left_alone():
    model = Towers(tower(16, 24, 16))
    model.head = tower(16, 20, 20, 4)
    assert causes(model) == [{}] * 4


def test_a_copy_is_left_alone():
    """As a target network is one, which nobody has frozen."""
    assert causes(Towers(tower(16, 32, 16))) == [{}] * 4
    assert "dead" in causes(Towers(tower(16, 32, 32, 16)))[-1]


def test_a_tower_that_was_trained_before_is_left_alone():
    """Its weights are less random than those that were just drawn."""
    teacher = tower(16, 24, 24, 16)
    with torch.no_grad():
        for layer in teacher[::2]:
            layer.weight += 3 * torch.outer(*(torch.randn(n).sign() / n**0.5 for n in layer.weight.shape))
    assert causes(Towers(teacher)) == [{}] * 4


def test_a_tower_whose_optimizer_waits_is_left_alone():
    """As an actor waits for its critic."""
    model = Towers(tower(16, 24, 24, 16))
    rest = [*model.query.parameters(), *model.head.parameters()]
    optimizers = [torch.optim.AdamW(rest, 1e-3), torch.optim.AdamW(model.other.parameters(), 1e-3)]
    probe = SpectralProbe(model, optimizers, every_n_steps=1, mode="observe")
    for step in range(4):
        with probe.step():
            x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
            nn.functional.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
    assert "dead" not in {verdict.cause for verdict in probe.latest.roots}


def cut_off(cut=("tok", "a"), first="tok", moves=0.05, drift=0.0, lr=0.01, frozen=()):
    """The layers that count as cut off, where these ones have outputs and no gradient."""
    names = list(LAYERS)[list(LAYERS).index(first) :]
    changed = {
        "feature_rms": {},
        "update_natural": nothing(*cut),
        "update_ratio": dict.fromkeys(LAYERS, moves) | nothing(*cut),
        "drift_ratio": dict.fromkeys(cut, drift),
        "lr": dict.fromkeys(cut, lr),
        "contribution": nothing(*cut),
    }
    reasons = {f"update_natural/{name}": UNUSED for name in cut}
    layers = {name: LAYERS[name] for name in names}
    measurement = measured(3, layers=layers, reasons=reasons, **changed)
    measurement.values["feature_rms"].fill_(1.0)
    settings = set_by("SGD") | {name: replace(set_by("SGD")[name], frozen=True) for name in frozen}
    return Network.read(measurement, columns(measurement), settings).cut_off


@pytest.mark.parametrize(
    ("case", "names"),
    [
        ({}, {"tok", "a"}),
        ({"cut": ("tok", "a", "b", "c")}, {"tok", "a", "b", "c"}),
        ({"cut": ("tok",)}, set()),  # one may be meant
        ({"cut": ("a", "b")}, set()),  # not the first
        ({"cut": ("a", "b"), "first": "a"}, {"a", "b"}),
        ({"cut": ("tok", "a", "c")}, {"tok", "a", "c"}),
        ({"cut": ("head",), "first": "head"}, set()),  # nothing is hidden
        ({"moves": 0.0}, set()),  # nothing moves
        ({"moves": 0.5}, {"tok", "a"}),
        ({"drift": 0.01}, set()),  # they have moved before
        ({"lr": 0.0}, set()),
        ({"frozen": ("tok",)}, set()),
        ({"cut": ("tok", "a", "b"), "frozen": ("b",)}, {"tok", "a"}),
    ],
)
def test_what_is_cut_off_are_the_first_layers_of_a_network_that_moves(case, names):
    assert cut_off(**case) == names


class Adapted(nn.Module):
    """A trained network that is frozen, with factors of low rank that nothing is called for, and a new head."""

    def __init__(self, detached):
        super().__init__()
        torch.manual_seed(0)
        self.base, self.head, self.detached = nn.Linear(16, 16).requires_grad_(False), nn.Linear(16, 4), detached
        self.down, self.up = nn.Parameter(torch.randn(4, 16) / 4), nn.Parameter(torch.zeros(16, 4))

    def forward(self, x):
        h = torch.relu(self.base(x) + x @ self.down.T @ self.up.T)
        return self.head(h.detach() if self.detached else h)


@pytest.mark.parametrize("detached", [True, False])
def test_where_no_gradient_reaches_anything_but_the_readout_all_is_cut_off(detached):
    net = Adapted(detached)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], 1e-2)
    probe = SpectralProbe(net, optimizer, every_n_steps=1)
    for step in range(8):
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
        with training_step(probe, optimizer):
            nn.functional.cross_entropy(net(x), (x[:, 0] > 0).long()).backward()
    named = {name for verdict in probe.latest.verdicts for name in verdict.layers}
    assert named == ({"down", "up"} if detached else set())


def test_spare_readouts_of_a_frozen_network_are_not_cut_off():
    torch.manual_seed(0)
    base, heads = nn.Linear(16, 16).requires_grad_(False), nn.ModuleList(nn.Linear(16, 4) for _ in range(6))
    net = nn.ModuleDict({"base": base, "heads": heads})
    optimizer = torch.optim.AdamW(heads.parameters(), 1e-2)
    probe = SpectralProbe(net, optimizer, every_n_steps=1)
    for step in range(8):
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
        with training_step(probe, optimizer):
            outputs = [head(torch.relu(base(x))) for head in heads]
            nn.functional.cross_entropy(sum(outputs[:4]), (x[:, 0] > 0).long()).backward()
    assert not probe.latest.verdicts


def owned(rates, families=("Adam", "Adam"), now=1.0):
    """Settings of layers a and b under one optimizer, c and the head under another; ``now``: of the schedule."""
    one, two = set_by(families[0], owner=0), set_by(families[1], owner=1)
    found = {name: (one if name[0] in "tab" else two)[name] for name in LAYERS}
    for name, setting in found.items():
        rate = rates[setting.owner]
        found[name] = replace(setting, lr=rate * now, peak=rate)
    return found


def apart(rates, slow=0.0005, families=("Adam", "Adam"), now=1.0, stopped=(), **changed):
    """The roots, where the layers of one optimizer move by a smaller part of themselves."""
    settings = owned(rates, families, now)
    for name in stopped:
        settings[name] = replace(settings[name], lr=0.0, peak=0.0)
    still = {name: slow for name, setting in settings.items() if setting.peak == min(rates)}
    lr = {name: setting.lr for name, setting in settings.items()}
    judge = Judge(SpectralCondition())
    for step in range(1, 4):
        verdicts = judge.judge(measured(step, lr=lr, update_ratio=still, **changed), settings)
    return [verdict for verdict in verdicts if verdict.is_root]


@pytest.mark.parametrize("slow", [0, 1])
def test_networks_trained_side_by_side_have_rates_of_one_order(slow):
    """A generator at a hundredth of the discriminator's rate, or the other way round."""
    rates = [0.001, 0.001]
    rates[slow] /= 100
    found = apart(rates)
    assert {verdict.cause for verdict in found} == {"lr_too_small"}
    assert all(verdict.remedy.value == pytest.approx(0.001) for verdict in found)
    named = {name for verdict in found for name in verdict.layers}
    assert named >= ({"a", "b"} if slow == 0 else {"c", "head"})
    assert not named & ({"c", "head"} if slow == 0 else {"a", "b"})


def test_adam_for_sparse_gradients_is_adam():
    """Embeddings of a recommender with an optimizer of their own."""
    assert {verdict.cause for verdict in apart([0.00001, 0.001], families=("SparseAdam", "AdamW"))} == {"lr_too_small"}


def test_a_layer_without_a_rate_has_no_part_in_that():
    named = {name for verdict in apart([0.00001, 0.001], stopped=["tok"]) for name in verdict.layers}
    assert named == {"a", "b"}


def test_a_name_that_all_of_a_network_share_makes_no_purpose():
    """A generator at a hundredth of its rate, which is four times the discriminator's: 25 times apart."""
    names = {"a": "generator.0", "b": "generator.3", "c": "judge.0", "head": "judge.3"}
    layers = {names[name]: replace(LAYERS[name], name=names[name]) for name in names}
    settings = owned([0.00004, 0.001])
    settings = {names[name]: settings[name] for name in names}
    lr = {name: setting.lr for name, setting in settings.items()}
    steps = {name: 0.002 if name.startswith("generator") else 0.02 for name in layers}
    found = Judge(SpectralCondition()).judge(measured(1, layers=layers, lr=lr, update_ratio=steps), settings)
    assert {(verdict.layer, verdict.cause) for verdict in found} == {
        ("generator.0", "lr_too_small"),
        ("generator.3", "lr_too_small"),
    }


def test_ten_times_apart_other_optimizers_or_steps_that_are_alike_are_left_alone():
    assert not apart([0.001, 0.0001], slow=0.005)
    assert not apart([0.001, 0.00001], families=("Adam", "SGD"))
    assert not apart([0.001, 0.00001], slow=0.05), "as after a decay of one of them"
    trained = {"weight_natural": dict.fromkeys(LAYERS, 20.0), "drift_ratio": dict.fromkeys(LAYERS, 0.1)}
    assert not apart([0.001, 0.00001], **trained), "some may be fine-tuned"


def test_under_a_warm_up_the_advice_is_of_its_peak():
    verdict = apart([0.00001, 0.001], now=0.1)[0]
    assert (verdict.cause, verdict.remedy.action) == ("lr_too_small", "set_lr")
    assert verdict.remedy.value == pytest.approx(0.001)
