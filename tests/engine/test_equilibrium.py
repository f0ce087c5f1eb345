"""Weight decay and rotation: against float64 written out, and a long run of AdamW in equilibrium."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from spectral_monitor import SpectralProbe
from tests.one_step import training_step

torch.set_num_threads(1)
KEYS = ["update_angle", "radial", "decay_share", "equilibrium"]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.conv = nn.Embedding(11, 12), nn.Conv1d(12, 14, 3, groups=2)
        self.qkv, self.head = nn.Linear(14, 42), nn.Linear(42, 5, bias=False)

    def forward(self, tokens):
        x = torch.tanh(self.conv(self.embed(tokens).mT)).mean(2)
        return functional.cross_entropy(self.head(torch.tanh(self.qkv(x))), tokens[:, 0] % 5)


WEIGHTS = ("embed", "conv", "qkv", "head")


def made(dtype=torch.float32):
    torch.manual_seed(3)
    return Net().to(dtype)


def tokens(step):
    return torch.randint(11, (9, 6), generator=torch.Generator().manual_seed(step))


def measured(model, optimizer, steps=3, keys=KEYS, **settings):
    """The last of some steps, and the weights in float64 before and after it."""
    probe = SpectralProbe(model, optimizer, quantities=keys, every_n_steps=1, **settings)
    for step in range(steps):
        before = {name: p.detach().double().clone() for name, p in model.named_parameters()}
        with training_step(probe, optimizer):
            model(tokens(step)).backward()
    after = {name: p.detach().double().clone() for name, p in model.named_parameters()}
    return probe.latest, before, after


def angle(a, b):
    """Between two weights as long vectors; accurate where it is small."""
    a, b = a.flatten() / a.norm(), b.flatten() / b.norm()
    return 2 * math.atan2((a - b).norm().item(), (a + b).norm().item())


@pytest.mark.parametrize("low_memory", [False, True])
@pytest.mark.parametrize(("dtype", "rel"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_against_float64(dtype, rel, low_memory):
    lr, wd, beta = 0.02, 0.3, 0.8
    model = made(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=wd, betas=(beta, 0.99))
    latest, before, after = measured(model, optimizer, low_memory=low_memory, blocks={"qkv": 3})
    for name in WEIGHTS:
        old, new = before[f"{name}.weight"], after[f"{name}.weight"]
        change, turned = new - old, angle(old, new)
        expected = {
            "update_angle": turned,
            "radial": ((old * change).sum() / old.norm() / change.norm()).item(),
            "decay_share": (lr * wd * old.norm() / change.norm()).item(),
            "equilibrium": turned / math.sqrt(2 * lr * wd * (1 - beta) / (1 + beta)),
        }
        for key, value in expected.items():
            assert latest.value(key, name) == pytest.approx(value, rel=rel, abs=1e-7), (key, name)
    assert latest.summary["equilibrium_steps"] == pytest.approx(1 / (2 * lr * wd))


def test_what_shrinks_alone_does_not_turn():
    """Nothing but decay: the angle is 0, radial is -1, and all of the update is decay."""
    model = made(torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.3, eps=1e30)
    latest, _, _ = measured(model, optimizer)
    for name in WEIGHTS:
        assert latest.value("radial", name) == pytest.approx(-1, abs=1e-9)
        assert latest.value("decay_share", name) == pytest.approx(1, rel=1e-9)
        assert latest.value("update_angle", name) < 1e-7


GRADIENT = "its weight decay, if it has any, is part of the gradient"
NONE = "it has no weight decay"


@pytest.mark.parametrize(
    ("optimizer", "settings", "share", "balance"),
    [
        (torch.optim.AdamW, {"weight_decay": 0.1}, "", ""),
        (torch.optim.AdamW, {"weight_decay": 0.0}, NONE, NONE),
        (torch.optim.Adam, {"weight_decay": 0.1}, GRADIENT, GRADIENT),
        (torch.optim.Adam, {"weight_decay": 0.1, "decoupled_weight_decay": True}, "", ""),
        (torch.optim.SGD, {"weight_decay": 0.1}, GRADIENT, GRADIENT),
        (
            torch.optim.NAdam,
            {"weight_decay": 0.1, "decoupled_weight_decay": True},
            "",
            "the angle in equilibrium is known only for AdamW and similar optimizers",
        ),
    ],
)
def test_without_decoupled_decay_there_is_a_reason(optimizer, settings, share, balance):
    model = made()
    latest, _, _ = measured(model, optimizer(model.parameters(), lr=0.01, **settings))
    for key, why in (("decay_share", share), ("equilibrium", balance)):
        assert latest.why(key, "qkv") == why
        assert math.isnan(latest.value(key, "qkv")) == bool(why)
    assert latest.value("update_angle", "qkv") > 0
    steps = latest.summary["equilibrium_steps"]
    assert math.isnan(steps) if share else steps == pytest.approx(1 / (2 * 0.01 * 0.1))


def test_decay_of_what_a_weight_is_computed_from_is_not_its_own():
    model = made()
    nn.utils.parametrizations.weight_norm(model.qkv)
    latest, _, _ = measured(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    assert latest.why("decay_share", "qkv") == "weight decay acts on the parameters that its weight is computed from"
    assert latest.value("update_angle", "qkv") > 0


@pytest.mark.slow
def test_adamw_comes_into_equilibrium():
    """Hidden matrices in front of normalizations, the mean of many steps after 3 / (lr wd) = 600 of them.

    The steps' averages of gradients overlap, which makes each step smaller: without ``beta1`` it would be 0.23.
    """
    torch.manual_seed(0)
    lr, wd, names = 0.01, 0.5, ("0", "3", "6")
    layers = [m for n in (32, 64, 64) for m in (nn.Linear(n, 64, bias=False), nn.LayerNorm(64), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(64, 10))
    decayed = [model[int(name)].weight for name in names]
    others = [p for p in model.parameters() if not any(p is q for q in decayed)]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, weight_decay=wd)
    probe = SpectralProbe(model, optimizer, quantities=["equilibrium"], every_n_steps=5, include=list(names))
    teacher = torch.randn(32, 10)
    for _ in range(1500):
        x = torch.randn(4, 32)
        with training_step(probe, optimizer):
            functional.cross_entropy(model(x), (x @ teacher).argmax(1)).backward()
    late = [m for m in probe.measurements if m.step > 3 / (lr * wd)]
    for name in names:
        assert sum(m.value("equilibrium", name) for m in late) / len(late) == pytest.approx(1, rel=0.1), name
        assert probe.measurements[0].value("equilibrium", name) > 1.3, name
    assert late[-1].summary["equilibrium_steps"] == pytest.approx(100)
