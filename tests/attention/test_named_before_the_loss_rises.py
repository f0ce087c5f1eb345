"""A GPT whose queries and keys learn 30 times too fast: its attention is named before its loss rises."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

from spectral_monitor import SpectralCondition, SpectralProbe
from spectral_monitor.condition.settings import CHECKS
from tests.attention.families import TOKENS

KEYS = ["lr", "update_natural", "attention_logit_max", "attention_entropy_lowest"]
ATTENTION = ("logits_exploding", "attention_collapsed")
STEPS, RATE = 60, 5e-3


def text(steps):
    """Sequences of a Markov chain of characters, which is learned in a few steps."""
    generator = torch.Generator().manual_seed(0)
    follow = torch.randint(TOKENS, (TOKENS, 2), generator=generator)
    ids = torch.randint(TOKENS, (steps, 16, 1), generator=generator)
    for _ in range(31):
        choice = torch.randint(2, (steps, 16), generator=generator)
        ids = torch.cat([ids, follow[ids[..., -1], choice][..., None]], -1)
    return ids


def llama():
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=TOKENS,
        max_position_embeddings=64, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config)


def run(factor, ignore=()):
    model = llama()
    named = dict(model.named_parameters())
    fast = [p for name, p in named.items() if "q_proj" in name or "k_proj" in name]
    rest = [p for name, p in named.items() if "q_proj" not in name and "k_proj" not in name]
    groups = [{"params": rest}, {"params": fast, "lr": factor * RATE}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, weight_decay=0.0)
    condition = SpectralCondition(ignore=ignore)
    probe = SpectralProbe(model, optimizer, quantities=KEYS, every_n_steps=2, condition=condition, mode="observe")
    losses, verdicts = [], {}
    for step, ids in enumerate(text(STEPS), 1):
        optimizer.zero_grad()
        with probe.step():
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
        losses.append(float(loss.detach()))
        for verdict in probe.latest.verdicts if probe.latest else ():
            verdicts.setdefault(verdict.cause, (step, verdict))
    return losses, verdicts


def rises(losses):
    """The first step from which the loss is clearly above the lowest so far."""
    lowest = losses[0]
    for step, loss in enumerate(losses, 1):
        if loss > 1.1 * lowest + 0.05:
            return step
        lowest = min(lowest, loss)
    return len(losses) + 1


@pytest.mark.slow
def test_its_logits_and_its_rate_are_named_before_the_loss_rises():
    losses, verdicts = run(30, ignore=[name for name in CHECKS if name not in ATTENTION])
    step, verdict = verdicts["lr_too_large"]
    assert verdict.quantity == "attention_logit_max"
    assert verdict.value > 50
    assert "q_proj" in verdict.layer
    assert verdict.remedy.value == pytest.approx(RATE)
    assert 2 * step < rises(losses) <= STEPS


@pytest.mark.slow
def test_the_check_of_rates_names_it_at_the_first_measurement():
    _, verdicts = run(30)
    step, verdict = verdicts["lr_too_large"]
    assert step == 2
    assert all("q_proj" in name or "k_proj" in name for name in verdict.layers)


@pytest.mark.slow
def test_at_the_rate_of_the_others_attention_is_healthy_and_the_loss_falls():
    losses, verdicts = run(1)
    assert not set(ATTENTION) & set(verdicts)
    assert rises(losses) > STEPS
