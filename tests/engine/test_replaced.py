"""Layers that become others during training are not measured as if they had not."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from spectral_monitor import SpectralMonitorWarning, SpectralProbe
from spectral_monitor.engine.results.reasons import REPLACED
from tests.one_step import training_step


class Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


class Run:
    """A probe that measures every step, and the network and optimizer it watches."""

    def __init__(self, net=None, **options):
        self.net = network() if net is None else net
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.probe = SpectralProbe(self.net, self.optimizer, every_n_steps=1, mode="observe", **options)

    def step(self):
        with training_step(self.probe, self.optimizer):
            self.net(torch.randn(16, 6)).square().mean().backward()
        return self.probe.latest


def pruned(net):
    prune.l1_unstructured(net[2], "weight", amount=0.5)


def parametrized(net):
    parametrize.register_parametrization(net[2], "weight", Twice())


def weight_normed(net):
    nn.utils.parametrizations.weight_norm(net[2])


def given_another_weight(net):
    net[2].weight = nn.Parameter(net[2].weight.detach().clone())


def exchanged(net):
    net[2] = nn.Linear(8, 8)


WAYS = {
    pruned: {"2"},
    parametrized: {"2"},
    weight_normed: {"2"},
    given_another_weight: {"2"},
    exchanged: {"2", "2.bias"},
}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_layer_that_is_another_now_has_no_numbers_but_a_reason(way):
    run = Run()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = run.step()
    assert not math.isnan(before.value("weight_natural", "2"))
    way(run.net)
    with pytest.warns(SpectralMonitorWarning, match=r"not measured any more: 2(, 2\.bias)?; its weight was replaced"):
        after = run.step()
    for name in (info.name for info in after.layers):
        gone = name in WAYS[way]
        assert (after.why("weight_natural", name) == REPLACED) == gone
        assert math.isnan(after.value("weight_natural", name)) == gone
    numbers = {key: after.value(key, "2") for key in after.values}
    assert all(map(math.isnan, numbers.values()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that is said once
        run.step()


def test_nor_has_one_that_is_parametrized_once_more_or_no_more():
    for change in (parametrized, lambda net: parametrize.remove_parametrizations(net[2], "weight")):
        net = network()
        parametrized(net)
        run = Run(net)
        assert not math.isnan(run.step().value("weight_fro", "2"))
        change(net)
        with pytest.warns(SpectralMonitorWarning, match="not measured any more: 2;"):
            assert math.isnan(run.step().value("weight_fro", "2"))


def test_nor_has_one_of_a_deep_copy():
    run = copy.deepcopy(Run())
    given_another_weight(run.net)
    with pytest.warns(SpectralMonitorWarning, match="not measured any more: 2;"):
        assert math.isnan(run.step().value("weight_fro", "2"))


def test_what_returns_is_measured_again():
    run = Run()
    weight = run.net[2].weight
    given_another_weight(run.net)
    with pytest.warns(SpectralMonitorWarning, match="not measured any more"):
        run.step()
    run.net[2].weight = weight
    assert not math.isnan(run.step().value("weight_fro", "2"))


def swapped_in_place(net):
    for p in net.parameters():
        p.data = p.data.clone() * 0.99


def tied(net):
    net[4].register_parameter("extra", net[2].weight)


def moved_to_float64_and_back(net):
    net.double().float()


def frozen(net):
    net[0].requires_grad_(False)


@pytest.mark.parametrize(
    "way", [swapped_in_place, tied, moved_to_float64_and_back, frozen, nn.Module.eval], ids=lambda way: way.__name__
)
def test_other_changes_are_none(way):
    run = Run()
    run.step()
    way(run.net)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not math.isnan(run.step().value("weight_fro", "2"))


def test_layers_that_are_added_later_are_named_once():
    run = Run()
    run.step()
    run.net.add_module("5", nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)))
    run.net.register_parameter("scale", nn.Parameter(torch.ones(3)))
    with pytest.warns(SpectralMonitorWarning, match=r"^not measured, because added after .*: scale, 5\.0, 5\.2\. "):
        assert not math.isnan(run.step().value("weight_fro", "2"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that is said once, and nothing of it by a new probe
        run.step()
        assert {"5.0", "5.2"} <= {info.name for info in Run(run.net).step().layers}


def test_names_are_few():
    run = Run(nn.Sequential(*(nn.Linear(6, 6) for _ in range(7))))
    run.step()
    for layer in run.net:
        given_another_weight([None, None, layer])
    with pytest.warns(SpectralMonitorWarning, match="any more: 0, 1, 2, 3, 4 and 2 more; its weight"):
        run.step()


def unparametrized(net):
    parametrize.remove_parametrizations(net[2], "weight")


@pytest.mark.parametrize(
    ("before", "after"),
    [(pruned, lambda net: prune.remove(net[2], "weight")), (parametrized, unparametrized)],
    ids=["pruning", "parametrization"],
)
def test_what_a_weight_was_computed_by_may_go(before, after):
    """That layer is measured no more; the others are."""
    net = network()
    before(net)
    run = Run(net)
    run.step()
    after(net)
    start = net[0].weight.detach().clone()
    with pytest.warns(SpectralMonitorWarning, match="not measured any more: 2; its weight was replaced") as caught:
        latest = run.step()
    assert len(caught) == 1
    assert latest.step == 2
    assert latest.value("update_fro", "0") == pytest.approx(float((net[0].weight.detach() - start).norm()), rel=1e-4)
    for key in latest.values:
        assert math.isnan(latest.value(key, "2"))
        assert latest.why(key, "2")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (pruned, lambda net: prune.remove(net[2], "weight")),
        (lambda net: nn.utils.weight_norm(net[2]), lambda net: nn.utils.remove_weight_norm(net[2])),
    ],
    ids=["pruning", "weight norm"],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # the older weight norm, which keeps the weight as an attribute
def test_a_batch_that_was_stored_before_hides_no_parameter(before, after):
    """The weight was an attribute then; put back, it would be used in the parameter's place."""
    net = network()
    before(net)
    run = Run(net, drift_every=1)
    run.step()
    after(net)
    with pytest.warns(SpectralMonitorWarning, match="not measured any more: 2"):
        drift = run.step().value("feature_drift", "4")
    assert "weight" not in vars(net[2])
    assert drift > 0
    net[2].weight.grad = None
    run.step()
    assert net[2].weight.grad is not None
