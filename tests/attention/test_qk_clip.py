"""``qk_clip``: logits above the limit lower the learning rates of queries and keys, and nothing else."""

from __future__ import annotations

import math

import pytest
import torch
import transformers as hf

from spectral_monitor import LRCorrection, SpectralCondition, SpectralProbe
from spectral_monitor.condition.settings import CHECKS
from tests.attention.families import TOKENS
from tests.attention.test_named_before_the_loss_rises import RATE, llama, text

LIMIT = 50.0
FAST = [f"model.layers.{i}.self_attn.{part}_proj" for i in (0, 1) for part in "qk"]


def train(factor, steps, **settings):
    """A LLaMA whose queries and keys learn ``factor`` times as fast, where verdicts mend nothing."""
    model = llama()
    named = dict(model.named_parameters())
    fast = [named[f"{name}.weight"] for name in FAST]
    groups = [{"params": [p for p in named.values() if not any(p is q for q in fast)]}]
    optimizer = torch.optim.AdamW([*groups, {"params": fast, "lr": factor * RATE}], lr=RATE, weight_decay=0.0)
    probe = SpectralProbe(
        model, optimizer, quantities=["lr", "attention_logit_max"], every_n_steps=1, mode="correct",
        correction=LRCorrection("balance", **settings), condition=SpectralCondition(ignore=list(CHECKS)),
    )  # fmt: skip
    logits, rates = [], []
    for ids in text(steps):
        optimizer.zero_grad()
        with probe.step():
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
        logits.append(max(probe.latest.value("attention_logit_max", name) for name in FAST if "q_proj" in name))
        rates.append({info.name: probe.latest.value("lr", info.name) for info in probe.latest.layers})
    return probe, model, logits, rates


@pytest.mark.slow
def test_logits_stay_near_the_limit():
    _, _, free, _ = train(30, 20)
    _, _, held, rates = train(30, 20, qk_clip=LIMIT)
    first = next(step for step, logit in enumerate(held) if logit > LIMIT)
    assert held[: first + 1] == free[: first + 1], "nothing changes before"
    assert free[-1] > 10 * LIMIT
    assert held[-1] < 4 * LIMIT
    for name, rate in rates[first].items():
        assert name in FAST or rates[first + 1][name] == rate
    over = held[first] / LIMIT
    assert min(rates[first + 1][name] / rates[first][name] for name in FAST) == pytest.approx(over**-2, rel=1e-3)


def test_below_the_limit_training_is_the_same_bit_for_bit():
    _, plain, _, _ = train(1, 6)
    probe, limited, logits, _ = train(1, 6, qk_clip=100.0)
    assert max(logits) < 100
    assert set(probe.multipliers.values()) == {1.0}
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), limited.parameters(), strict=True))


def test_it_goes_on_after_a_checkpoint():
    probe, _, _, _ = train(30, 8, qk_clip=LIMIT)
    other, _, _, _ = train(1, 1, qk_clip=LIMIT)
    assert min(probe.multipliers[name] for name in FAST) < 0.5
    assert set(other.multipliers.values()) == {1.0}
    other._supervisor.load_state_dict(probe._supervisor.state_dict())
    assert other.multipliers == probe.multipliers


@pytest.mark.parametrize("limit", [0.0, -1.0, math.inf, math.nan, True, "100"])
def test_impossible_limits_are_refused(limit):
    with pytest.raises(ValueError, match="qk_clip must be a positive number or None"):
        LRCorrection(qk_clip=limit)


def test_a_limit_that_is_tight_is_no_fault_of_the_layers_it_slows():
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(
        hf.LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=TOKENS
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    probe = SpectralProbe(
        model, optimizer, every_n_steps=1, mode="correct", correction=LRCorrection("balance", qk_clip=0.05)
    )
    flagged = set()
    for ids in text(8):
        optimizer.zero_grad()
        with probe.step():
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
        flagged |= {name for verdict in probe.latest.verdicts for name in verdict.layers}
    slow = probe.multipliers["model.layers.0.self_attn.q_proj"]
    assert slow < 1 / 30
    assert not flagged & set(FAST)


def test_logits_are_measured_only_if_they_are_limited():
    assert "attention_logit_max" not in LRCorrection().quantities
    assert "attention_logit_max" in LRCorrection(qk_clip=100).quantities
