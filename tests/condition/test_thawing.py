"""Layers that thaw while training goes on, as in fine-tuning, and rates of layers that began at zero."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.nn import functional

from spectral_monitor import SpectralProbe
from tests.one_step import training_step

WIDTH = 32


def step(probe, model, optimizer):
    x = torch.randn(32, WIDTH)
    with training_step(probe, optimizer):
        functional.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
    return {verdict.cause: verdict for verdict in probe.verdicts}


def backbone(count=4):
    torch.manual_seed(0)
    layers = [layer for _ in range(count) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.ModuleDict({"body": nn.Sequential(*layers), "head": nn.Linear(WIDTH, 4)})


class Tuned(nn.Module):
    """A body that is frozen first, and a head."""

    def __init__(self):
        super().__init__()
        self.body, self.head = backbone().values()

    def forward(self, x):
        return self.head(self.body(x))


def thaw(model, optimizer, layers, lr):
    for layer in layers:
        model.body[layer].requires_grad_(True)
        optimizer.add_param_group({"params": list(model.body[layer].parameters()), "lr": lr})


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("layers", [(6,), (2, 4, 6), (0, 2, 4, 6)])
def test_a_tenth_of_the_rate_is_usual_for_what_thaws_and_others_may_stay_frozen(layers, resumed):
    model = Tuned()
    model.body.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.head.parameters(), 1e-3)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, mode="observe")
    for _ in range(3):
        step(probe, model, optimizer)
    if resumed:
        state = json.loads(json.dumps(probe.state_dict()["state"]["oversight"]))
        probe = SpectralProbe(model, optimizer, every_n_steps=1, mode="observe")
        probe._supervisor.load_state_dict(state)
    thaw(model, optimizer, layers, 1e-4)
    for _ in range(4):
        assert not step(probe, model, optimizer)


@pytest.mark.parametrize(("frozen", "lr"), [(False, 1e-5), (True, 1e-6)])
def test_rates_that_nothing_explains_are_told(frozen, lr):
    model = Tuned()
    model.body.requires_grad_(not frozen)
    optimizer = torch.optim.AdamW(
        [
            {
                "params": [
                    p for name, p in model.named_parameters() if not name.startswith("body.2") and p.requires_grad
                ]
            },
            *([] if frozen else [{"params": list(model.body[2].parameters()), "lr": lr}]),
        ],
        1e-3,
    )
    probe = SpectralProbe(model, optimizer, every_n_steps=1, mode="observe")
    step(probe, model, optimizer)
    if frozen:
        thaw(model, optimizer, (0, 4, 6), 1e-3)
        thaw(model, optimizer, (2,), lr)
    found = step(probe, model, optimizer)
    assert found["lr_too_small"].layers == ("body.2",)


class Residual(nn.Module):
    """Branches that end with zeros, and as many other layers and one more."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.first = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.second = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.tail = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.head = nn.Linear(WIDTH, 4)
        for layer in self.second:
            nn.init.zeros_(layer.weight)

    def forward(self, x):
        h = self.stem(x)
        for first, second in zip(self.first, self.second, strict=True):
            h = h + second(first(h).relu())
        return self.head(self.tail(h))


def test_steps_of_layers_that_began_at_zero_do_not_tell_which_rate_is_the_usual_one():
    """Relative to what they began with any step is large: six of thirteen layers are too slow, not seven too fast."""
    model = Residual()
    slow = [p for name, p in model.named_parameters() if name.startswith(("first", "second"))]
    others = [p for name, p in model.named_parameters() if not name.startswith(("first", "second"))]
    optimizer = torch.optim.Adam([{"params": others}, {"params": slow, "lr": 2e-6}], 2e-4)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, mode="observe")
    for _ in range(12):
        found = step(probe, model, optimizer)
        told = {name for verdict in found.values() for name in verdict.layers}
        assert all(name.startswith(("first", "second")) for name in told)
    assert set(found["lr_too_small"].layers) == {f"{part}.{k}" for part in ("first", "second") for k in range(3)}
