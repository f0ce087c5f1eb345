"""Heads that processes share out, by tensor parallelism or FSDP2: the numbers are those of one process."""

from __future__ import annotations

import math

import pytest
import torch
import transformers as hf
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from spectral_monitor import SpectralProbe
from spectral_monitor.layers.attention import AttentionBlock, Projection, local_heads
from tests.gloo import on_processes
from tests.one_step import training_step

WEIGHTS = ("qk_gain", "qk_gain_head", "qk_update")
ROWS = ("attention_logit_max", "attention_entropy", "attention_entropy_lowest", "attention_sink")


class Attention(nn.Module):
    """Without rotation, so that ``qk_gain`` is the norm of the bilinear form itself; heads as wide as they are here."""

    num_heads, head_dim = 4, 8

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            f(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        return x + self.o_proj(
            nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(19, 32), nn.Linear(32, 19)
        self.layers = nn.ModuleList(nn.ModuleDict({"self_attn": Attention()}) for _ in range(2))

    def forward(self, tokens):
        h = self.tokens(tokens)
        for layer in self.layers:
            h = layer["self_attn"](h)
        return nn.functional.cross_entropy(self.head(h)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def made(kind, key_heads):
    """Return a model, its blocks and how its loss is read."""
    torch.manual_seed(0)
    if kind == "plain":
        net = Plain()
        return net, net.layers, net
    net = hf.LlamaForCausalLM(
        hf.LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                       num_key_value_heads=key_heads, vocab_size=19, tie_word_embeddings=False)
    )  # fmt: skip
    return net, net.model.layers, lambda tokens: net(input_ids=tokens, labels=tokens).loss


def job(kind, way, key_heads=2):
    """Return the numbers of two steps, and why some are missing; ``way``: ``""`` for one process."""
    net, blocks, loss = made(kind, key_heads)
    rank, count = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if way else (0, 1)
    if way == "tp":
        mesh = init_device_mesh("cpu", (count,), mesh_dim_names=("tp",))
        plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        for block in blocks:
            parallelize_module(block, mesh, plan | {"self_attn.o_proj": RowwiseParallel()})
    if way == "fsdp2":
        for part in (*(module for module in net.modules() if hasattr(module, "q_proj")), net):
            fully_shard(part)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    probe = SpectralProbe(
        net,
        optimizer,
        every_n_steps=1,
        quantities=[*WEIGHTS, *ROWS],
        **({"data_parallel_rank": 0} if way == "tp" else {}),
    )
    for k in range(2):
        tokens = torch.randint(19, (4, 12), generator=torch.Generator().manual_seed(k))
        with training_step(probe, optimizer):
            loss(tokens[rank::count] if way == "fsdp2" else tokens).backward()
    layers = [layer.info.name for layer in probe.anatomy.layers if layer.info.name.endswith("q_proj")]
    values = {key: [m.value(key, layer) for m in probe.measurements for layer in layers] for key in (*WEIGHTS, *ROWS)}
    return [values, {key: probe.latest.why(key, layers[0]) for key in (*WEIGHTS, *ROWS)}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("llama", "tp"),
        pytest.param("llama", "fsdp2", marks=pytest.mark.slow),
        pytest.param("plain", "tp", marks=pytest.mark.exhaustive),
        pytest.param("plain", "fsdp2", marks=pytest.mark.exhaustive),
    ],
)
def test_two_processes_have_the_numbers_of_one(tmp_path, kind, way):
    expected, _ = job(kind, "")
    first, second = on_processes(job, tmp_path, 2, kind, way)
    assert first == second or repr(first) == repr(second)
    for key in WEIGHTS if way == "fsdp2" else (*WEIGHTS, *ROWS):
        assert not any(map(math.isnan, expected[key])), key
        assert first[0][key] == pytest.approx(expected[key], rel=1e-4), key
    for key in ROWS:  # of other sequences under data parallelism
        assert not any(map(math.isnan, first[0][key])), (key, first[1][key])


@pytest.mark.slow
def test_a_head_that_is_cut_has_a_reason(tmp_path):
    """One head of keys that four heads of queries share: two processes have half of it each."""
    first, second = on_processes(job, tmp_path, 2, "llama", "fsdp2", 1)
    for values, why in (first, second):
        for key in WEIGHTS:
            assert all(map(math.isnan, values[key]))
            assert why[key] == "its queries and keys are sharded over processes, and no process has whole heads"


def block(query, key, value, size=8, tiled=False):
    parts = [Projection(i, tuple(starts), size) for i, starts in enumerate((query, key, value))]
    module = torch.nn.Identity()
    return AttentionBlock("a", module, *parts, 1.0, False, None, None, True, True, tiled)


FOUR, TWO = (0, 8, 16, 24), (0, 8)


@pytest.mark.parametrize(
    ("whole", "held", "expected"),
    [
        (block(FOUR, FOUR, FOUR), {0: None, 1: None, 2: None}, (0, FOUR, FOUR)),
        (block(FOUR, FOUR, FOUR), {0: (16, 32), 1: (16, 32), 2: (16, 32)}, (2, TWO, TWO)),
        (block(FOUR, TWO, TWO), {0: (0, 16), 1: (0, 8), 2: (0, 8)}, (0, TWO, (0,))),
        (block(FOUR, TWO, TWO), {0: (16, 32), 1: (8, 16), 2: (8, 16)}, (2, TWO, (0,))),
        (block(FOUR, TWO, TWO), {0: (16, 32), 1: (0, 8), 2: (0, 8)}, None),  # keys of other queries
        (block(FOUR, TWO, TWO), {0: (16, 32), 1: (8, 16), 2: (0, 8)}, None),  # values of other keys
        (block(FOUR, FOUR, FOUR), {0: (0, 12), 1: (0, 12), 2: (0, 12)}, None),  # a head is cut
        (block(FOUR, FOUR, FOUR), {0: (0, 0), 1: (0, 0), 2: (0, 0)}, None),  # nothing is here
        (block(FOUR, TWO, TWO, tiled=True), {0: (0, 16), 1: (0, 16), 2: (0, 16)}, (0, TWO, TWO)),
        (block(FOUR, TWO, TWO, tiled=True), {0: (0, 16), 1: (0, 8), 2: (0, 8)}, None),  # heads take turns
    ],
)
def test_heads_come_with_the_keys_and_values_they_meet(whole, held, expected):
    found = local_heads(whole, held)
    assert (found is None) == (expected is None)
    if found is not None:
        assert (found.first, found.block.query.starts, found.block.key.starts) == expected
        assert found.total == 4
