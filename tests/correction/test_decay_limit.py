"""SGD's weight decay at corrected learning rates: at most a thousandth of a weight in a step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spectral_monitor import LRCorrection, SpectralProbe
from spectral_monitor.condition.optimizers.hyperparameters import MAX_DECAY
from spectral_monitor.correction.override.lr_override import LRMultiplierOverride


def stepped(kind, multiplier, steps, keeps_decay=False, **options):
    """A weight after some corrected steps without a gradient, which decay alone moves."""
    weight = nn.Parameter(torch.full((3,), 8.0, dtype=torch.float64))
    optimizer = kind([weight], **options)
    swap = LRMultiplierOverride([optimizer], {weight: multiplier}, keeps_decay=keeps_decay)
    swap.arm()
    for _ in range(steps):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    swap.disarm()
    assert optimizer.param_groups[0]["weight_decay"] == options["weight_decay"], "the option is as the user set it"
    return weight[0].item() / 8.0


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("multiplier", [1.5, 70.0, 5e4])
def test_it_takes_a_thousandth_at_most(momentum, multiplier):
    options = {"lr": 0.01, "momentum": momentum, "weight_decay": 0.01}
    taken = min(0.01 * multiplier * 0.01, MAX_DECAY * (1 - momentum))  # by a step without earlier ones
    assert stepped(torch.optim.SGD, multiplier, 1, **options) == pytest.approx(1 - taken, rel=1e-9)
    remaining, velocity, decay = 1.0, 0.0, taken / (0.01 * multiplier)
    for _ in range(50):
        velocity = momentum * velocity + decay * remaining
        remaining -= 0.01 * multiplier * velocity
    assert stepped(torch.optim.SGD, multiplier, 50, **options) == pytest.approx(remaining, rel=1e-9)


def test_decay_of_others_and_of_rates_that_keep_their_meaning_is_not_limited():
    options = {"lr": 0.01, "weight_decay": 0.1}
    assert stepped(torch.optim.AdamW, 70.0, 1, **options) == pytest.approx(1 - 0.07)
    assert stepped(torch.optim.AdamW, 70.0, 1, keeps_decay=True, **options) == pytest.approx(1 - 0.001)
    assert stepped(torch.optim.SGD, 70.0, 1, keeps_decay=True, **options) == pytest.approx(1 - 0.07)


def trained(lr, decay=0.05, steps=40):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=decay)
    probe = SpectralProbe(model, optimizer, mode="correct", correction=LRCorrection(), verbose=False)
    data = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(64, 16, generator=data)
        with probe.step():
            loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return probe, model


def test_a_run_is_the_same_from_any_rate_and_its_decay_is_not_blamed():
    runs = [trained(lr) for lr in (0.1, 1e-3)]
    for p, q in zip(*(model.parameters() for _, model in runs), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
    probe, _ = runs[0]
    assert not [verdict for m in probe.measurements for verdict in m.verdicts if verdict.cause == "decay_too_large"]
    taken = {name: 0.05 * 0.1 * multiplier / 0.1 for name, multiplier in probe.multipliers.items()}
    assert max(taken.values()) > 10 * MAX_DECAY, "it would be"


def test_the_code_has_the_limited_decay():
    probe, _ = trained(0.1)
    code = probe.param_groups_code()
    groups = {}
    exec(code.partition("optimizer = ")[0].replace("named = dict(self.named_parameters())", ""), groups)
    for group in groups["groups"]:
        taken = group["lr"] * group.get("weight_decay", 0.05) / (1 - 0.9)
        assert taken == pytest.approx(min(MAX_DECAY, group["lr"] * 0.05 / 0.1), rel=1e-3)


class WithoutDecay(torch.optim.Optimizer):
    """Gradient descent whose weight decay is None."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "weight_decay": None})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            assert group["weight_decay"] is None
            for p in group["params"]:
                p -= group["lr"] * p.grad


def test_a_decay_of_none_is_left_alone():
    weight = nn.Parameter(torch.full((3,), 8.0))
    optimizer = WithoutDecay([weight], lr=0.01)
    swap = LRMultiplierOverride([optimizer], {weight: 70.0}, keeps_decay=False)
    swap.arm()
    weight.grad = torch.ones(3)
    optimizer.step()
    swap.disarm()
    assert weight.tolist() == pytest.approx([7.3] * 3)
