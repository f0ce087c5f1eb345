"""Values of the whole network that are missing say why."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from spectral_monitor.engine.results.summary import DEFAULT_REASONS
from tests.one_step import after_one_step


class Embeddings(nn.Module):
    """Word vectors, which have neither hidden layers nor a readout."""

    def __init__(self):
        super().__init__()
        self.words, self.contexts = nn.Embedding(9, 4), nn.Embedding(9, 4)

    def forward(self, x):
        return (self.words(x[:, 0]) * self.contexts(x[:, 1])).sum(-1)


def perceptron():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def measured(model, loss, quantities):
    """A measurement of one step."""
    probe = after_one_step(model, lambda: loss(model), every_n_steps=1, quantities=quantities, mode="observe")
    return probe.latest


def reasons(make, x, quantities="full"):
    """Value of the whole network that is NaN -> why."""
    torch.manual_seed(0)
    found = measured(make(), lambda model: (model(x) - 1).square().mean(), quantities)
    return {key: found.why(key, "summary") for key, value in found.summary.items() if math.isnan(value)}


@pytest.mark.parametrize("quantities", ["light", "standard", "full"])
@pytest.mark.parametrize(
    ("make", "x"),
    [(Embeddings, torch.tensor([[1, 2], [3, 4]])), (perceptron, torch.eye(6)), (perceptron, torch.zeros(4, 6))],
    ids=["embeddings", "perceptron", "inputs of zero"],
)
def test_whatever_is_missing_has_a_reason(make, x, quantities):
    missing = reasons(make, x, quantities)
    assert all(missing.values()), missing


def test_reasons_are_those_of_the_network():
    missing = reasons(Embeddings, torch.tensor([[1, 2], [3, 4]]))
    assert missing["equilibrium_steps"] == DEFAULT_REASONS["equilibrium_steps"]
    assert missing["linearity"] == "no output layer is measured"
    assert missing["property_fl"].startswith("needs a single output layer")


def test_there_is_no_reason_for_a_quantity_that_does_not_exist():
    found = measured(perceptron(), lambda model: model(torch.eye(6)).square().mean(), "light")
    with pytest.raises(KeyError, match="no quantity 'update_rato'; did you mean 'update_ratio'"):
        found.why("update_rato", "0")
    with pytest.raises(KeyError, match=r"no quantity 'zz'\. It has: weight_norm, "):
        found.why("zz", "0.bias")
    assert found.why("feature_rms", "0") == "feature_rms was not measured at this step"


def test_a_readouts_reason_is_the_networks():
    """Of one whose weight is used without a call of it."""

    def loss(model):
        return nn.functional.linear(model[:2](torch.eye(6)), model[2].weight, model[2].bias).square().mean()

    torch.manual_seed(0)
    latest = measured(perceptron(), loss, ["alignment"])
    assert math.isnan(latest.summary["final_layer_alignment"])
    assert latest.why("final_layer_alignment", "summary") == latest.why("alignment", "2") != ""
