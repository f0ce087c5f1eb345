"""What optimizers' settings say of each layer, read off real optimizers."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from spectral_monitor.condition.optimizers.hyperparameters import (
    Hyperparameters,
    family,
    hyperparameters,
    rectification,
    weight_decay,
)
from spectral_monitor.layers import dissect
from tests.condition.synthetic import set_by, verdicts_on


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def read(model, *optimizers):
    return hyperparameters(dissect(model).layers, optimizers)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["AdamW", "Adam", "Optimizer", "object"], "adam"),
        (["FusedAdam"], "adam"),
        (["Lion"], "adam"),
        (["Adafactor"], "adam"),
        (["RMSprop"], "adam"),
        (["SGD", "Optimizer"], "sgd"),
        (["ASGD"], "sgd"),
        (["SignSGD"], "adam"),
        (["Muon"], "muon"),
        (["SingleDeviceMuonWithAuxAdam"], "muon"),
        (["Shampoo"], "muon"),
        (["LAMB"], "lamb"),
        (["LARS", "SGD"], "lamb"),
        (["Rocket", "Optimizer"], ""),
        (["Rprop", "Optimizer"], ""),
        ([], ""),
    ],
)
def test_family_of_an_optimizer(names, expected):
    assert family(names) == expected


def test_an_unknown_name_is_told_by_the_classes_it_derives_from():
    class Mine(torch.optim.AdamW):
        pass

    model = network()
    found = read(model, Mine(model.parameters()))["0"]
    assert (found.optimizer, found.family) == ("Mine", "adam")


def test_what_an_optimizer_does_not_have_is_zero():
    model = network()
    adagrad = read(model, torch.optim.Adagrad(model.parameters()))["0"]
    assert (adagrad.momentum, adagrad.weight_decay) == (0.0, 0.0)
    odd = torch.optim.Adagrad(model.parameters())
    odd.param_groups[0]["momentum"] = odd.param_groups[0]["weight_decay"] = None
    assert (read(model, odd)["0"].momentum, read(model, odd)["0"].weight_decay) == (0.0, 0.0)
    alone = read(model)["0"]
    assert (alone.optimizer, alone.momentum, alone.weight_decay) == ("", 0.0, 0.0)


def test_every_layer_has_the_settings_of_its_group():
    """Groups are counted over all optimizers."""
    model = network()
    adam = torch.optim.AdamW(
        [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.5, "weight_decay": 0.0}],
        lr=0.1,
        betas=(0.8, 0.99),
        eps=1e-6,
        weight_decay=0.3,
    )
    sgd = torch.optim.SGD(model[4].parameters(), lr=0.2, momentum=0.9)
    found = read(model, adam, sgd)
    assert found["0"] == Hyperparameters("AdamW", "adam", 0, 0, 0.1, 0.1, 1e-6, 0.8, 0.3, True, base_momentum=0.8)
    assert found["2.bias"] == Hyperparameters("AdamW", "adam", 1, 0, 0.5, 0.5, 1e-6, 0.8, 0.0, True, base_momentum=0.8)
    last = found["4"]
    assert (last.optimizer, last.family, last.group, last.owner) == ("SGD", "sgd", 2, 1)
    assert (last.lr, last.momentum, last.weight_decay, last.decoupled) == (0.2, 0.9, 0.0, False)
    assert math.isnan(last.eps)


def test_one_optimizer_for_all_in_which_some_groups_are_not_for_muon():
    """As in the reference implementation of Muon, which marks them."""

    class MuonWithAuxAdam(torch.optim.SGD):
        pass

    model = network()
    groups = [
        {"params": [model[0].weight, model[2].weight], "use_muon": True},
        {"params": [model[4].weight], "use_muon": False, "betas": (0.9, 0.95), "eps": 1e-10},
    ]
    found = read(model, MuonWithAuxAdam(groups, lr=0.02))
    assert (found["0"].optimizer, found["0"].family) == ("MuonWithAuxAdam", "muon")
    assert (found["4"].optimizer, found["4"].family, found["4"].eps) == ("AdamW", "adam", 1e-10)
    assert found["0"].owner == found["4"].owner == 0


def test_the_peak_of_one_cycle_is_its_max_lr():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    OneCycleLR(optimizer, max_lr=0.5, total_steps=10)
    found = read(model, optimizer)["0"]
    assert found.lr == pytest.approx(0.5 / 25)
    assert found.peak == 0.5


def test_the_peak_of_a_warm_up_is_the_initial_lr():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    LambdaLR(optimizer, lambda step: (step + 1) / 100)
    found = read(model, optimizer)["0"]
    assert (found.lr, found.peak) == (pytest.approx(0.001), 0.1)


def test_without_a_schedule_the_peak_is_the_learning_rate():
    model = network()
    found = read(model, torch.optim.SGD(model.parameters(), lr=0.1))["0"]
    assert found.lr == found.peak == 0.1


def test_learning_rates_may_be_tensors():
    model = network()
    found = read(model, torch.optim.Adam(model.parameters(), lr=torch.tensor(0.25)))["0"]
    assert (found.lr, found.peak) == (0.25, 0.25)
    assert isinstance(found.lr, float)


def test_what_is_no_number_is_not_known():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0] |= {"lr": torch.tensor([0.1, 0.2]), "eps": "small", "weight_decay": None}
    found = read(model, optimizer)["0"]
    assert math.isnan(found.lr)
    assert math.isnan(found.peak)
    assert math.isnan(found.eps)
    assert found.weight_decay == 0.0


def test_a_frozen_layer_is_one_of_which_nothing_requires_a_gradient():
    model = network()
    model[0].requires_grad_(False)
    model[2].weight.requires_grad_(False)
    found = read(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert {name for name, of in found.items() if of.frozen} == {"0", "0.bias", "2"}
    assert found["0"].group == 0, "an optimizer holds it all the same"


def test_a_layer_of_two_parameters_is_frozen_if_both_are():
    """Weight normalization keeps directions and lengths apart."""
    model = network()
    torch.nn.utils.parametrizations.weight_norm(model[0])
    (direction, length) = model[0].parametrizations.weight.parameters()
    direction.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert not read(model, optimizer)["0"].frozen
    length.requires_grad_(False)
    assert read(model, optimizer)["0"].frozen


def test_a_layer_without_an_optimizer_has_no_settings():
    model = network()
    found = read(model, torch.optim.SGD(model[0].parameters(), lr=0.1))["4"]
    assert (found.optimizer, found.family, found.group, found.owner) == ("", "", -1, -1)
    assert math.isnan(found.lr)
    assert read(model)["0"].owner == -1


@pytest.mark.parametrize(("dtype", "resolution"), [(torch.float32, 2.0**-23), (torch.bfloat16, 2.0**-7)])
def test_the_resolution_is_that_of_the_weights(dtype, resolution):
    model = network().to(dtype)
    assert read(model, torch.optim.SGD(model.parameters(), lr=0.1))["0"].resolution == resolution


class Quantized(torch.nn.Module):
    def forward(self, stored):
        return stored.float() / 100


def test_a_weight_that_is_kept_in_integers_has_no_resolution():
    model = network()
    model[0].weight = torch.nn.Parameter((100 * model[0].weight).to(torch.int8), requires_grad=False)
    torch.nn.utils.parametrize.register_parametrization(model[0], "weight", Quantized(), unsafe=True)
    found = read(model, torch.optim.SGD(model[2].parameters(), lr=0.1))
    assert (found["0"].resolution, found["0"].frozen) == (0.0, True)


def own(name, base=torch.optim.SGD):
    """An optimizer of that name, which another library may have."""
    return type(name, (base,), {})


@pytest.mark.parametrize(
    ("kind", "group", "factor", "beta1"),
    [
        (torch.optim.AdamW, {"betas": (0.8, 0.99)}, 0.3, 0.8),
        (torch.optim.AdamW, {"betas": (torch.tensor(0.8), 0.99)}, 0.3, 0.8),
        (torch.optim.AdamW, {"betas": None}, 0.3, math.nan),
        (torch.optim.Adam, {"betas": (0.8, 0.99)}, math.nan, math.nan),  # part of the gradient
        (torch.optim.Adam, {"betas": (0.8, 0.99), "decoupled_weight_decay": True}, 0.3, 0.8),
        (torch.optim.NAdam, {"betas": (0.8, 0.99), "decoupled_weight_decay": True}, 0.3, math.nan),  # looks ahead
        (torch.optim.SGD, {}, math.nan, math.nan),
        (own("Lion"), {"betas": (0.8, 0.99)}, 0.3, math.nan),
        (own("Muon"), {}, 0.3, math.nan),
        (own("Prodigy"), {"decouple": True}, 0.3, math.nan),
        (own("AdaBelief"), {"weight_decouple": True}, 0.3, math.nan),
        (own("Adafactor"), {"scale_parameter": True}, math.nan, math.nan),  # which scales decay by the weights' size
        (own("LambTimm"), {"decoupled_decay": False}, math.nan, math.nan),
        (own("MuonWithAuxAdam"), {"use_muon": False, "betas": (0.8, 0.99)}, 0.3, 0.8),
        (own("FusedAdamW", torch.optim.Adam), {"betas": (0.8, 0.99), "decoupled_weight_decay": None}, 0.3, 0.8),
    ],
)
def test_weight_decay_is_known_where_it_is_apart_from_the_gradient(kind, group, factor, beta1):
    """And ``beta1`` where steps are averages of gradients, as Adam's are."""
    optimizer = kind([torch.zeros(2, requires_grad=True)], lr=0.1, weight_decay=0.3)
    optimizer.param_groups[0] |= group
    assert weight_decay(optimizer, optimizer.param_groups[0]) == pytest.approx((factor, beta1), nan_ok=True)


def test_an_optimizer_may_say_itself_that_its_decay_is_decoupled():
    optimizer = own("AdaBelief")([torch.zeros(2, requires_grad=True)], lr=0.1, weight_decay=0.3)
    assert math.isnan(weight_decay(optimizer, optimizer.param_groups[0]).factor)
    optimizer.weight_decouple = True
    assert weight_decay(optimizer, optimizer.param_groups[0]).factor == 0.3


def test_a_group_that_names_no_weight_decay_has_none():
    optimizer = torch.optim.AdamW([torch.zeros(2, requires_grad=True)], weight_decay=0.3)
    del optimizer.param_groups[0]["weight_decay"]
    assert weight_decay(optimizer, optimizer.param_groups[0]) == (0.0, 0.9)


def test_settings_are_plain_data_and_reading_changes_nothing():
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    before = repr(optimizer.state_dict())
    row = read(model, optimizer)["0"].to_row()
    assert json.loads(json.dumps(row)) == row
    assert Hyperparameters(**row) == read(model, optimizer)["0"]
    assert repr(optimizer.state_dict()) == before


BETAS = {"betas": (0.8, 0.95)}
DECAYED = {
    "AdamW": (torch.optim.AdamW, BETAS, (0.1, 0.8)),
    "Adam": (torch.optim.Adam, BETAS, (math.nan, math.nan)),
    "Adam, decoupled": (torch.optim.Adam, BETAS | {"decoupled_weight_decay": True}, (0.1, 0.8)),
    "NAdam, decoupled": (torch.optim.NAdam, BETAS | {"decoupled_weight_decay": True}, (0.1, math.nan)),
    "SGD": (torch.optim.SGD, {}, (math.nan, math.nan)),
    "Adafactor": (torch.optim.Adafactor, {}, (0.1, math.nan)),
    "RMSprop": (torch.optim.RMSprop, {}, (math.nan, math.nan)),
}


@pytest.mark.parametrize("name", DECAYED)
def test_weight_decay_beside_the_gradient_and_the_momentum_it_is_beside(name):
    """What is added to the gradient is no part of the update by itself; steps of NAdam look ahead."""
    kind, settings, expected = DECAYED[name]
    optimizer = kind(network().parameters(), weight_decay=0.1, **settings)
    assert tuple(weight_decay(optimizer, optimizer.param_groups[0])) == pytest.approx(expected, nan_ok=True)


def test_the_rectification_of_radam_is_what_a_constant_gradient_is_moved_by():
    """Of which the averages are the gradient itself, and its square: but for the first steps, which go with it."""
    layer = nn.Linear(3, 1, bias=False)
    radam = torch.optim.RAdam(layer.parameters(), lr=0.1, betas=(0.9, 0.95))
    found, moved = [], []
    for _ in range(60):
        before, layer.weight.grad = layer.weight.detach().clone(), torch.full_like(layer.weight, 7.0)
        radam.step()
        moved.append(float((before - layer.weight.detach())[0, 0]) / 0.1)
        found.extend(its.rectified for its in read(layer, radam).values())
    assert moved[:5] == pytest.approx([7.0] * 5, rel=1e-5)
    assert found[:5] == [0.0] * 5
    assert found[5:] == pytest.approx(moved[5:], rel=1e-3)
    assert found[5] < 0.2 < 0.9 < found[-1] < 1
    assert {its.rectified for its in read(layer, torch.optim.Adam(layer.parameters())).values()} == {1}


@pytest.mark.parametrize("alpha", [0.9, 0.99])
def test_the_first_steps_of_rmsprop_are_known_to_be_large(alpha):
    """Under a constant gradient an entry moves by the learning rate once the average is old."""
    layer = nn.Linear(3, 1, bias=False)
    rmsprop = torch.optim.RMSprop(layer.parameters(), lr=0.1, alpha=alpha)
    for _ in range(40):
        before, layer.weight.grad = layer.weight.detach().clone(), torch.full_like(layer.weight, 7.0)
        ahead = rectification(rmsprop, rmsprop.param_groups[0], ahead=1)
        rmsprop.step()
        moved = float((before - layer.weight.detach())[0, 0]) / 0.1
        (its,) = read(layer, rmsprop).values()
        assert its.rectified == ahead == pytest.approx(moved, rel=1e-4)
    fresh = torch.optim.RMSprop(layer.parameters(), lr=0.1, alpha=1.0)
    assert rectification(fresh, fresh.param_groups[0], ahead=1) == 1


def test_the_first_steps_of_radam_are_compared_with_nothing():
    slow = {"update_natural": {"b": 0.001}}
    for rectified, named in ((0.0, False), (0.1, True)):
        settings = {name: replace(its, rectified=rectified) for name, its in set_by("RAdam").items()}
        assert bool(verdicts_on(9, settings=settings, **slow)) == named
