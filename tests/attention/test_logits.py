"""``attention_logit_max``, ``attention_entropy`` and ``attention_sink`` against attention that is written out."""

from __future__ import annotations

import math

import pytest
import torch
from families import FAMILIES, make
from torch.nn import functional

from spectral_monitor import SpectralProbe

KEYS = ["attention_logit_max", "attention_entropy", "attention_entropy_lowest", "attention_sink"]


def measured(family, keys=KEYS, lr=0.05, **more):
    optimizer = torch.optim.SGD(family.model.parameters(), lr=lr)
    probe = SpectralProbe(family.model, optimizer, quantities=keys, **more)
    with probe.step():
        family.loss().backward()
        optimizer.step()
    return probe.latest


def recorded(family):
    """The probabilities and logits of the first attention block: by the arguments of the kernel itself."""
    calls = []

    def kernel(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **more):
        turns = query.shape[-3] // key.shape[-3]  # x-transformers repeats them itself
        key, value = (x.repeat_interleave(turns, -3) for x in (key, value))
        logits = query.double() @ key.double().mT * (query.shape[-1] ** -0.5 if scale is None else scale)
        allowed = torch.ones(logits.shape[-2:], dtype=torch.bool)
        if is_causal:
            allowed = allowed.tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            allowed = allowed & attn_mask
        elif attn_mask is not None:
            allowed = allowed & (attn_mask > -1e4)
        calls.append((logits, allowed.expand_as(logits)))
        weights = logits.masked_fill(~allowed, -torch.inf).softmax(-1).to(value)
        return weights @ value

    original = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = torch.nn.functional.scaled_dot_product_attention = kernel
    try:
        with torch.no_grad():
            family.loss()
    finally:
        functional.scaled_dot_product_attention = original
    return calls[0]


def naive(logits, allowed):
    """The four numbers, row by row; of the sampled rows of every sequence, in float64."""
    batch, heads, length, _ = logits.shape
    picked = [round(float(x)) for x in torch.linspace(0, batch - 1, min(4, batch))]
    count = min(length, 64 // len(picked))
    rows = [round(float(x)) for x in torch.linspace(0, length - 1, count)]
    largest, entropies, sinks = -math.inf, {h: [] for h in range(heads)}, []
    for b in picked:
        for h in range(heads):
            for r in rows:
                keys = allowed[b, h, r].nonzero().flatten().tolist()
                some = [float(logits[b, h, r, k]) for k in keys]
                largest = max(largest, *some)
                total = math.fsum(math.exp(x - max(some)) for x in some)
                p = [math.exp(x - max(some)) / total for x in some]
                sinks.append(p[keys.index(0)] if 0 in keys else 0.0)
                if len(keys) > 1:
                    entropies[h].append(-math.fsum(x * math.log(x) for x in p if x > 0) / math.log(len(keys)))
    means = [sum(some) / len(some) for some in entropies.values() if some]
    return [largest, sum(means) / len(means), min(means), sum(sinks) / len(sinks)]


ROTARY = {"x_transformers": {"rotary_pos_emb": True, "attn_flash": True}}


@pytest.mark.parametrize("name", FAMILIES)
def test_numbers_are_those_of_attention_written_out(name):
    family = make(name, **ROTARY.get(name, {}))
    expected = naive(*recorded(family))
    found = measured(family)
    got = [found.value(key, family.layer) for key in KEYS]
    assert got == pytest.approx(expected, rel=1e-5, abs=1e-6), found.why(KEYS[0], family.layer)


@pytest.mark.parametrize("name", ["gpt2", "llama", "neox", "bert"])
def test_eager_attention_gives_the_same(name):
    by_kernel = {}
    for kernel in ("sdpa", "eager"):
        family = make(name, attn_implementation=kernel)
        found = measured(family)
        by_kernel[kernel] = [found.value(key, family.layer) for key in KEYS]
    assert by_kernel["eager"] == pytest.approx(by_kernel["sdpa"], rel=1e-5)
    assert not any(map(math.isnan, by_kernel["eager"]))
