"""Watching attention changes nothing, leaves nothing behind, and costs the measurement at most."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from spectral_monitor import SpectralProbe
from spectral_monitor.quantities import QUANTITIES
from tests.attention.families import FAMILIES, WIDTH, make
from tests.one_step import after_one_step

KEYS = [key for key in QUANTITIES if key.startswith(("attention_", "qk_"))]
QK = [key for key in KEYS if key.startswith("qk_")]


def hooks(model):
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, name)) for module in model.modules() for name in names)


@pytest.mark.parametrize("keys", [KEYS, QK], ids=["all", "weights alone"])
@pytest.mark.parametrize("name", FAMILIES)
def test_training_is_bit_identical_and_nothing_stays(name, keys):
    results = []
    for watched in (False, True):
        family = make(name)
        optimizer = torch.optim.AdamW(family.model.parameters(), lr=1e-2)
        probe = SpectralProbe(family.model, optimizer, every_n_steps=1, quantities=keys) if watched else None
        torch.manual_seed(9)
        for _ in range(3):
            optimizer.zero_grad()
            with probe.step() if watched else nullcontext():
                family.loss().backward()
                optimizer.step()
        results.append([*family.model.state_dict().values(), torch.rand(3)])
        assert hooks(family.model) == 0
    assert all(map(torch.equal, *results))


def test_an_exception_in_the_forward_leaves_nothing():
    family = make("gpt2")
    optimizer = torch.optim.SGD(family.model.parameters(), lr=0.1)
    probe = SpectralProbe(family.model, optimizer, every_n_steps=1, quantities=KEYS)
    with pytest.raises(IndexError), probe.step():
        family.model(input_ids=torch.full((2, 3), 10**6))
    assert hooks(family.model) == 0


def test_of_accumulated_batches_the_last_one_counts():
    found = []
    for batches in (1, 2):
        family = make("timm")
        optimizer = torch.optim.SGD(family.model.parameters(), lr=0.0)
        probe = SpectralProbe(family.model, optimizer, every_n_steps=1, quantities=KEYS)
        pictures = torch.randn(2, 6, 3, 8, 8, generator=torch.Generator().manual_seed(8))
        with probe.step(accumulated=batches):
            for some in pictures[2 - batches :]:
                family.model(some).square().mean().backward()
            optimizer.step()
        found.append([probe.latest.value(key, family.layer) for key in KEYS])
    assert found[0] == found[1]
    assert not any(map(math.isnan, found[0]))


def test_with_features_and_replays_the_numbers_are_those_of_the_step():
    found = []
    for more in ([], ["feature_change", "bfa", "feature_drift"]):
        family = make("gpt2")
        probe = after_one_step(family.model, family.loss, lr=0.5, quantities=[*KEYS, *more])
        found.append([probe.latest.value(key, family.layer) for key in KEYS])
    assert found[0] == found[1]


def test_a_copy_of_the_model_made_in_the_step_has_no_hooks_that_act():
    family = make("gpt2")
    optimizer = torch.optim.SGD(family.model.parameters(), lr=0.1)
    probe = SpectralProbe(family.model, optimizer, every_n_steps=1, quantities=KEYS)
    with probe.step():
        loss = family.loss()
        twin = copy.deepcopy(family.model)
        loss.backward()
        optimizer.step()
    twin(input_ids=torch.zeros(1, 3, dtype=torch.long))
    assert math.isfinite(probe.latest.value("attention_sink", family.layer))


def test_activation_checkpointing_is_seen_once():
    found = []
    for again in (False, True):
        family = make("gpt2")
        if again:
            family.model.gradient_checkpointing_enable()
        probe = after_one_step(family.model, family.loss, quantities=KEYS)
        found.append([probe.latest.value(key, family.layer) for key in KEYS])
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_what_is_compiled_has_a_reason():
    family = make("gpt2")
    model = family.model
    model.transformer.h[0].compile(backend="eager")
    probe = after_one_step(model, family.loss, quantities=KEYS)
    assert "compiled" in probe.latest.why("attention_sink", "transformer.h.0.attn.c_attn")
    assert math.isfinite(probe.latest.value("attention_sink", "transformer.h.1.attn.c_attn"))
    assert math.isfinite(probe.latest.value("qk_gain", "transformer.h.0.attn.c_attn"))


class Broken(nn.Module):
    """Has the names of attention, and is none: its keys are of another length."""

    def __init__(self):
        super().__init__()
        self.num_heads = 4
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        return self.o_proj(self.q_proj(x) + self.k_proj(x[:, :1]) + self.v_proj(x))


def test_names_alone_make_no_attention():
    model = nn.Sequential(Broken(), nn.Linear(WIDTH, 2))
    probe = after_one_step(model, lambda: model(torch.randn(3, 5, WIDTH)).square().mean(), quantities=KEYS)
    assert math.isnan(probe.latest.value("attention_logit_max", "0.q_proj"))
    assert probe.latest.why("attention_logit_max", "0.q_proj")


def test_infinite_logits_are_said():
    family = make("gpt2")
    with torch.no_grad():
        family.model.transformer.h[0].attn.c_attn.weight[0, 0] = torch.nan
    probe = after_one_step(family.model, family.loss, quantities=KEYS)
    for key in ("attention_sink", "qk_gain"):
        assert probe.latest.why(key, family.layer) == "NaN or inf in its values"


def test_unmeasured_steps_have_no_hooks():
    family = make("gpt2")
    optimizer = torch.optim.SGD(family.model.parameters(), lr=0.1)
    probe = SpectralProbe(family.model, optimizer, quantities=KEYS, every_n_steps=2)
    seen = []
    for _ in range(3):
        with probe.step():
            seen.append(hooks(family.model))
            family.loss().backward()
            optimizer.step()
    assert seen[0] == seen[2] == 0 or seen[1] == 0
    assert max(seen) > 0
