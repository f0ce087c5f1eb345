"""The blocks of fused matrices, checked by what the models compute.

Where queries are zero, attention does not depend on the keys, nor on the queries where keys are zero; where values
are zero, it is zero. A gated layer is zero where its gate is. Rows that a layout gets wrong break that.
"""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from torch import nn

from spectral_monitor import SpectralProbe
from spectral_monitor.layers import dissect

WIDTH, HEADS, TOKENS, LENGTH = 16, 4, 11, 5
QKV, GATES = "query, key and value", "gate and up"
SHARED = {"vocab_size": TOKENS, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
NAMED = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": HEADS, **SHARED}
GPT = {"n_embd": WIDTH, "n_layer": 1, "n_head": HEADS, **SHARED}
FALCON = {**NAMED, "bias": True, "ffn_hidden_size": 24}
MAMBA = {"hidden_size": WIDTH, "num_hidden_layers": 1, "state_size": 3, "expand": 2, **SHARED}
PICTURE = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": HEADS, "image_size": 8, "patch_size": 4}


def falcon(**kind):
    return lambda: hf.FalconModel(hf.FalconConfig(**FALCON, **kind))


def phi3(heads):
    return lambda: hf.Phi3Model(hf.Phi3Config(**NAMED, intermediate_size=24, num_key_value_heads=heads))


def bigcode(multi_query):
    return lambda: hf.GPTBigCodeModel(hf.GPTBigCodeConfig(**GPT, multi_query=multi_query))


def modernbert():
    return hf.ModernBertModel(hf.ModernBertConfig(**NAMED, intermediate_size=24))


def dbrx():
    attention = {"kv_n_heads": 2, "clip_qkv": 1e9, "rope_theta": 1e4}
    ffn = {"ffn_hidden_size": 12, "moe_num_experts": 2, "moe_top_k": 1}
    sizes = {"d_model": WIDTH, "n_heads": HEADS, "n_layers": 1, "max_seq_len": LENGTH, "vocab_size": TOKENS}
    return hf.DbrxModel(hf.DbrxConfig(**sizes, attn_config=attention, ffn_config=ffn))


def glm():
    return hf.GlmModel(hf.GlmConfig(**NAMED, intermediate_size=24, num_key_value_heads=2, head_dim=4))


class VisionBlock(nn.Module):
    """As in timm, which is not needed for that."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim = HEADS, WIDTH // HEADS
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, C))


# Model, suffix of the layer's name, outputs of each block, note.
ATTENTION = {
    "GPT-2": (lambda: hf.GPT2Model(hf.GPT2Config(**GPT)), "c_attn", [16] * 3, QKV),
    "GPT-1": (lambda: hf.OpenAIGPTModel(hf.OpenAIGPTConfig(**GPT)), "c_attn", [16] * 3, QKV),
    "GPT-NeoX": (
        lambda: hf.GPTNeoXModel(hf.GPTNeoXConfig(**NAMED, intermediate_size=24)),
        "query_key_value",
        [16] * 3,
        f"{QKV} by turns, 4 times",
    ),
    "Persimmon": (
        lambda: hf.PersimmonModel(hf.PersimmonConfig(**NAMED, intermediate_size=24, qk_layernorm=False)),
        "query_key_value",
        [16] * 3,
        f"{QKV} by turns, 4 times",
    ),
    "Bloom": (
        lambda: hf.BloomModel(hf.BloomConfig(hidden_size=WIDTH, n_layer=1, n_head=HEADS, **SHARED)),
        "query_key_value",
        [16] * 3,
        f"{QKV} by turns, 4 times",
    ),
    "Falcon": (falcon(multi_query=False), "query_key_value", [16] * 3, f"{QKV} by turns, 4 times"),
    "Falcon, one key": (
        falcon(multi_query=True),
        "query_key_value",
        [16, 4, 4],
        f"{QKV} of 16, 4, 4 outputs",
    ),
    "Falcon, new": (
        falcon(new_decoder_architecture=True, num_kv_heads=2),
        "query_key_value",
        [16, 8, 8],
        f"{QKV} of 16, 8, 8 outputs by turns, 2 times",
    ),
    "ModernBERT": (modernbert, "Wqkv", [16] * 3, QKV),
    "MPT": (
        lambda: hf.MptModel(
            hf.MptConfig(d_model=WIDTH, n_heads=HEADS, n_layers=1, max_seq_len=LENGTH, vocab_size=TOKENS)
        ),
        "Wqkv",
        [16] * 3,
        QKV,
    ),
    "DBRX": (dbrx, "Wqkv", [16, 8, 8], f"{QKV} of 16, 8, 8 outputs"),
    "Phi-3": (phi3(HEADS), "qkv_proj", [16] * 3, QKV),
    "Phi-3, fewer keys": (phi3(2), "qkv_proj", [16, 8, 8], f"{QKV} of 16, 8, 8 outputs"),
    "GPTBigCode": (bigcode(False), "c_attn", [16] * 3, f"{QKV} by turns, 4 times"),
    "GPTBigCode, one key": (bigcode(True), "c_attn", [16, 4, 4], f"{QKV} of 16, 4, 4 outputs"),
    "CodeGen": (
        lambda: hf.CodeGenModel(hf.CodeGenConfig(**GPT, rotary_dim=4)),
        "qkv_proj",
        [16] * 3,
        "query, value and key by turns, 4 times",
    ),
    "BLIP": (
        lambda: hf.BlipVisionModel(hf.BlipVisionConfig(**PICTURE, intermediate_size=24)),
        "qkv",
        [16] * 3,
        QKV,
    ),
    "ViTDet": (lambda: hf.VitDetModel(hf.VitDetConfig(**PICTURE)), "qkv", [16] * 3, QKV),
    "timm": (lambda: nn.ModuleDict({"attn": VisionBlock()}), "qkv", [16] * 3, QKV),
}
GATED = {
    "Phi-3": (phi3(2), "gate_up_proj", [24] * 2, GATES),
    "GLM": (glm, "gate_up_proj", [24] * 2, GATES),
    "ModernBERT": (modernbert, "Wi", [24] * 2, "input and gate"),
    "Mamba": (lambda: hf.MambaModel(hf.MambaConfig(**MAMBA)), "in_proj", [32] * 2, "states and gate"),
    "Falcon Mamba": (
        lambda: hf.FalconMambaModel(hf.FalconMambaConfig(**MAMBA)),
        "in_proj",
        [32] * 2,
        "states and gate",
    ),
}


def built(make):
    """The model in double precision, all weights random and large enough to matter, no biases."""
    torch.manual_seed(0)
    model = make().double().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.zero_()
            elif p.ndim > 1:
                p.normal_(std=0.5)
    return model


def output(model):
    generator = torch.Generator().manual_seed(1)
    if isinstance(model, nn.ModuleDict):
        return model["attn"](torch.randn(2, LENGTH, WIDTH, generator=generator, dtype=torch.float64))
    if model.main_input_name == "pixel_values":
        return model(torch.randn(2, 3, 8, 8, generator=generator, dtype=torch.float64))[0]
    return model(torch.randint(TOKENS, (2, LENGTH), generator=generator))[0]


def the_layer(model, suffix):
    (layer,) = [x for x in dissect(model).layers if x.info.name.endswith(f".{suffix}") and x.is_matrix]
    return layer


def rows_of_block(layer, block):
    """Which outputs of the matrix belong to a block."""
    layout = layer.layout
    numbers = torch.arange(sum(layout.fan_outs), dtype=torch.float64).unsqueeze(1).expand(-1, layout.fan_in)
    held = numbers.T if layout.kind == "transposed" else numbers
    return layout.stack(held)[0, block, : layout.fan_outs[block], 0].long()


@torch.no_grad()
def set_block(layer, block, value):
    """Set the rows of a block to a constant, or to random numbers."""
    weight = layer.sources[0].T if layer.layout.kind == "transposed" else layer.sources[0]
    rows = rows_of_block(layer, block)
    new = torch.full((len(rows), layer.layout.fan_in), 0.0, dtype=weight.dtype)
    weight[rows] = new if value is None else torch.randn(new.shape, generator=value, dtype=weight.dtype)


@torch.no_grad()
def depends(make, suffix, zero, on):
    """Whether the model's output depends on block ``on`` when block ``zero`` (if any) is zero."""
    model, generator = built(make), torch.Generator().manual_seed(2)
    layer = the_layer(model, suffix)
    if zero is not None:
        set_block(layer, zero, None)
    before = output(model)
    set_block(layer, on, generator)
    return not torch.allclose(before, output(model), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ATTENTION)
def test_query_key_and_value(kind):
    make, suffix, fans, note = ATTENTION[kind]
    layer = the_layer(built(make), suffix)
    assert layer.note == note
    assert (list(layer.layout.fan_outs), layer.info.fan_in, layer.info.blocks) == (fans, WIDTH, 3)
    assert sorted(torch.cat([rows_of_block(layer, b) for b in range(3)]).tolist()) == list(range(sum(fans)))
    query, key, value = (0, 2, 1) if "query, value" in note else (0, 1, 2)
    assert all(depends(make, suffix, None, block) for block in range(3))
    assert not depends(make, suffix, query, key)
    assert not depends(make, suffix, key, query)
    assert not depends(make, suffix, value, query)
    assert not depends(make, suffix, value, key)
    assert depends(make, suffix, query, value)


@pytest.mark.parametrize("kind", GATED)
def test_gate_and_what_it_gates(kind):
    make, suffix, fans, note = GATED[kind]
    layer = the_layer(built(make), suffix)
    assert layer.note == note
    assert (list(layer.layout.fan_outs), layer.info.fan_in, layer.info.blocks) == (fans, WIDTH, 2)
    assert all(depends(make, suffix, None, block) for block in range(2))
    assert not depends(make, suffix, 0, 1)
    assert not depends(make, suffix, 1, 0)


def test_cross_attention_has_key_and_value():
    model = hf.GPT2Model(hf.GPT2Config(**GPT, add_cross_attention=True))
    layer = the_layer(model, "crossattention.c_attn")
    assert (layer.layout.fan_outs, layer.note) == ((16, 16), "key and value")


class Own(nn.Module):
    """Names that say much, numbers that say otherwise."""

    def __init__(self, name, outputs, **numbers):
        super().__init__()
        vars(self).update(numbers)
        setattr(self, name, nn.Linear(WIDTH, outputs, bias=False))
        self.head = nn.Linear(WIDTH, 2, bias=False)


UNKNOWN = "its name says query, key and value, but the blocks of its {} outputs are not known: one block"


@pytest.mark.parametrize(
    ("model", "fans", "note"),
    [
        (Own("qkv", 50), (50,), UNKNOWN.format(50)),
        (Own("query_key_value", 48, num_heads=4), (48,), UNKNOWN.format(48)),
        (Own("qkv", 32, num_heads=4, num_kv_heads=2), (16, 8, 8), f"{QKV} of 16, 8, 8 outputs"),
        (Own("qkv", 33, num_heads=4, num_kv_heads=2), (33,), UNKNOWN.format(33)),
        (Own("qkv", 48, num_heads=True), (16, 16, 16), QKV),
        (Own("Wi", 48), (48,), ""),
        (Own("in_proj", 48, intermediate_size=24), (48,), ""),
        (Own("projection", 48, num_heads=4), (48,), ""),
    ],
)
def test_numbers_decide(model, fans, note):
    layer = dissect(model).layers[0]
    assert (layer.layout.fan_outs, layer.note) == (fans, note)


@pytest.mark.parametrize("make", [bigcode(True), falcon(multi_query=False)])
def test_what_the_user_says_holds(make):
    model = make()
    name = next(x.info.name for x in dissect(model).layers if x.info.blocks == 3)
    layer = next(x for x in dissect(model, blocks={name: 2}).layers if x.info.name == name)
    assert (layer.info.blocks, layer.layout.fan_out, layer.note) == (2, sum(layer.layout.fan_outs) // 2, "")
    weight = layer.weight()
    assert torch.equal(layer.layout.stack(weight), weight.unflatten(0, (2, -1)).unsqueeze(0))


def by_hand(kind, weight):
    """Query, key and value rows as the models' own forwards slice them."""
    if kind == "Falcon, new":
        turns = weight.view(2, HEADS // 2 + 2, 4, -1)
        return [turns[:, :-2].flatten(0, 2), turns[:, -2].flatten(0, 1), turns[:, -1].flatten(0, 1)]
    if kind == "GPT-NeoX":
        return [part.flatten(0, 1) for part in weight.view(HEADS, 3 * 4, -1).chunk(3, dim=1)]
    return list(weight.split([16, 8, 8]))  # Phi-3


@pytest.mark.parametrize("kind", ["Phi-3, fewer keys", "Falcon, new", "GPT-NeoX"])
def test_a_step_is_measured_block_by_block(kind):
    make, suffix, _, _ = ATTENTION[kind]
    model = built(make).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, max_rows=None)
    layer = the_layer(model, suffix)
    (p,) = layer.sources
    inputs = []
    handle = layer.module.register_forward_hook(lambda m, args, out: inputs.append(args[0].detach().flatten(0, 1)))
    W = by_hand(kind, p.detach().clone())
    old = p.detach().clone()
    with probe.step():
        output(model).square().mean().backward()
        optimizer.step()
    handle.remove()
    dW = by_hand(kind, p.detach() - old)

    def worst(value, parts):
        return pytest.approx(max(float(value(part)) for part in parts), rel=1e-5)

    def sigma(part):
        return torch.linalg.matrix_norm(part, 2)

    def aligned(part):
        rows = inputs[0]
        return ((rows @ part.T).norm(dim=1) / (sigma(part) * rows.norm(dim=1))).mean()

    measured = {key: probe.latest.value(key, layer.info.name) for key in probe.latest.values}
    for what, parts in {"weight": W, "update": dW}.items():
        assert measured[f"{what}_norm"] == worst(sigma, parts)
        assert measured[f"{what}_natural"] == worst(lambda part: sigma(part) * (WIDTH / len(part)) ** 0.5, parts)
        assert measured[f"{what}_fro"] == worst(torch.linalg.matrix_norm, parts)
        assert measured[f"{what}_stable_rank"] == worst(lambda x: (torch.linalg.matrix_norm(x) / sigma(x)) ** 2, parts)
    assert measured["alignment"] == worst(aligned, W)
    assert measured["update_alignment"] == worst(aligned, dW)
    ratios = [float(sigma(a) / sigma(b)) for a, b in zip(dW, W, strict=True)]
    assert measured["update_ratio"] == pytest.approx(max(ratios), rel=1e-5)
    assert measured["contribution"] == pytest.approx(-float((p.grad * (p.detach() - old)).sum()), rel=1e-5)
    naturals = [float(sigma(part)) * (WIDTH / len(part)) ** 0.5 for part in W]
    assert kind == "GPT-NeoX" or max(naturals) != pytest.approx(float(max(map(sigma, W))))
