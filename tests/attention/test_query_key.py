"""``qk_gain`` and ``qk_update`` against exact norms of the bilinear forms, written out in float64."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from spectral_monitor import SpectralProbe
from tests.attention.families import FAMILIES, HEADS, SIZE, WIDTH, make
from tests.one_step import after_one_step

KEYS = ["qk_gain", "qk_gain_head", "qk_update"]


def measured(family, lr=0.05, **more):
    probe = after_one_step(family.model, family.loss, lr=lr, quantities=KEYS, **more)
    return probe.latest


def gains(query, key):
    return WIDTH / math.sqrt(SIZE) * torch.linalg.matrix_norm(query.mT @ key, 2)


def bounds(query, key):
    return WIDTH / math.sqrt(SIZE) * torch.linalg.matrix_norm(query, 2) * torch.linalg.matrix_norm(key, 2)


@pytest.mark.parametrize("name", FAMILIES)
def test_gain_and_update_are_those_of_the_written_out_form(name):
    family = make(name)
    query, key = family.weights()
    found = measured(family)
    new_query, new_key = family.weights()
    exact = (bounds if family.rotary else gains)(query, key)
    assert found.value("qk_gain", family.layer) == pytest.approx(float(exact.max()), rel=1e-5)
    assert found.value("qk_gain_head", family.layer) == int(exact.argmax())
    if family.rotary:
        change = bounds(new_query - query, new_key) + bounds(query, new_key - key)
        assert "rotary" in found.why("qk_gain", family.layer)
    else:
        written_out = new_query.mT @ new_key - query.mT @ key
        change = WIDTH / math.sqrt(SIZE) * torch.linalg.matrix_norm(written_out, 2)
        assert found.why("qk_gain", family.layer) == ""
    assert found.value("qk_update", family.layer) == pytest.approx(float(change.max()), rel=1e-4)
    for info in found.layers:
        if "q" not in info.name.rpartition(".")[2] and "attn" not in info.name and "in_proj" not in info.name:
            assert math.isnan(found.value("qk_gain", info.name))
            assert "queries" in found.why("qk_gain", info.name) or info.role == "vector"


@pytest.mark.parametrize("gain", [0.5, 3.0])
def test_with_normalized_queries_and_keys_it_is_the_bound_by_their_gains(gain):
    family = make("timm", qk_norm=True)
    attention = family.model.blocks[0].attn
    with torch.no_grad():
        attention.q_norm.weight.copy_(torch.linspace(0.1, gain, SIZE))
        attention.k_norm.weight.copy_(torch.linspace(2.0, 0.1, SIZE))
    largest = float((attention.q_norm.weight * attention.k_norm.weight).detach().max())
    found = measured(family)
    assert found.value("qk_gain", family.layer) == pytest.approx(math.sqrt(SIZE) * largest, rel=1e-5)
    assert "gains" in found.why("qk_gain", family.layer)
    assert math.isnan(found.value("qk_update", family.layer))
    assert "normalized" in found.why("qk_update", family.layer)


def test_no_vector_of_rms_1_makes_a_larger_logit():
    """An adversary: gradient ascent on the inputs reaches the gain, and not more."""
    family = make("gpt2")
    query, key = family.weights()
    gain = measured(family).value("qk_gain", family.layer)
    x, y = (torch.randn(HEADS, WIDTH, 1, dtype=torch.float64) for _ in range(2))
    for _ in range(300):
        x = query.mT @ (key @ y)
        x *= math.sqrt(WIDTH) / x.norm(dim=1, keepdim=True)
        y = key.mT @ (query @ x)
        y *= math.sqrt(WIDTH) / y.norm(dim=1, keepdim=True)
    logits = ((query @ x).mT @ (key @ y)).flatten() / math.sqrt(SIZE)
    assert float(logits.max()) == pytest.approx(gain, rel=1e-4)


class Unknown(nn.Module):
    """Says nothing of its heads."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (HEADS, SIZE)).transpose(-2, -3) for f in (self.q_proj, self.k_proj, self.v_proj))
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(-2, -3).flatten(-2)


def run_unknown(**more):
    torch.manual_seed(2)
    model = nn.Sequential(Unknown(), nn.Linear(WIDTH, 3))
    before = copy.deepcopy(model)
    probe = after_one_step(model, lambda: model(torch.randn(2, 5, WIDTH)).square().mean(), quantities=KEYS, **more)
    return before[0], probe.latest


def test_unknown_heads_are_one_and_the_reason_says_so():
    before, found = run_unknown()
    whole = before.q_proj.weight.double().T @ before.k_proj.weight.double()
    expected = WIDTH / math.sqrt(WIDTH) * float(torch.linalg.matrix_norm(whole, 2))
    assert found.value("qk_gain", "0.q_proj") == pytest.approx(expected, rel=1e-5)
    assert "measured as one" in found.why("qk_gain", "0.q_proj")


@pytest.mark.parametrize("pattern", ["0", "*q_proj"])
def test_heads_are_taken_from_the_argument(pattern):
    before, found = run_unknown(heads={pattern: HEADS})
    query, key = (
        layer.weight.detach().double().unflatten(0, (HEADS, SIZE)) for layer in (before.q_proj, before.k_proj)
    )
    assert found.value("qk_gain", "0.q_proj") == pytest.approx(float(gains(query, key).max()), rel=1e-5)
    assert found.why("qk_gain", "0.q_proj") == ""


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ({"nowhere": 2}, "heads: pattern 'nowhere' matches no layer"),
        ({"0": 5}, "heads: '0.q_proj' has 32 queries, which are not 5 heads of one size"),
        ({"0": 0}, "heads: '0': the number of heads must be an integer >= 1, got 0"),
    ],
)
def test_heads_that_do_not_fit_are_refused(heads, message):
    with pytest.raises(ValueError, match=message.replace("(", "\\(")):
        run_unknown(heads=heads)


def test_heads_of_a_network_without_attention_are_refused():
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"heads: .*: no module with projections of queries and keys was found"):
        SpectralProbe(model, optimizer, every_n_steps=1, heads={"*.attn": 2})


def test_a_step_that_changes_nothing_has_no_update():
    family = make("gpt2")
    assert measured(family, lr=0.0).value("qk_update", family.layer) == 0


def test_two_optimizers_and_host_memory_give_the_same():
    found = []
    for split, low_memory in ((False, False), (True, False), (False, True)):
        family = make("llama")
        names = dict(family.model.named_parameters())
        queries = [p for name, p in names.items() if "q_proj" in name]
        others = [p for name, p in names.items() if "q_proj" not in name]
        groups = [queries, others] if split else [[*queries, *others]]
        optimizers = [torch.optim.SGD(group, lr=0.05) for group in groups]
        probe = SpectralProbe(family.model, optimizers, every_n_steps=1, quantities=KEYS, low_memory=low_memory)
        with probe.step():
            family.loss().backward()
            for optimizer in optimizers:
                optimizer.step()
        found.append([probe.latest.value(key, family.layer) for key in KEYS])
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    assert found[2] == pytest.approx(found[0], rel=1e-6)
