"""Small transformers of the families that users have, and where each keeps the queries and keys of its heads."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import transformers as hf
from torch import nn

from tests.thirdparty.stand_in import import_timm

WIDTH, HEADS, SIZE, TOKENS, LENGTH = 32, 4, 8, 19, 12


@dataclass
class Family:
    """A model, and by hand the queries (heads, size, n) and keys of its first block as functions of the model.

    Attributes:
        model: the network.
        layer: name of the layer that makes the queries.
        weights: returns queries and keys, one key head for each head of queries.
        rotary: whether it rotates them, or calls a function that may.
        batch: returns what it is called with, and how its loss is read.
    """

    model: nn.Module
    layer: str
    weights: object
    loss: object
    rotary: bool = False


def by_head(weight, heads):
    return weight.detach().double().unflatten(0, (heads, -1))


def shared(keys, heads=HEADS):
    return keys.repeat_interleave(heads // len(keys), 0)


def ids():
    return torch.randint(TOKENS, (3, LENGTH), generator=torch.Generator().manual_seed(3))


def of_language(model):
    return lambda: model(input_ids=ids(), labels=ids()).loss


COMMON = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "vocab_size": TOKENS,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


def gpt2(**more):
    config = hf.GPT2Config(
        n_embd=WIDTH, n_layer=2, n_head=HEADS, vocab_size=TOKENS, n_positions=LENGTH, bos_token_id=0, eos_token_id=0,
        attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, **more,
    )  # fmt: skip
    model = hf.GPT2LMHeadModel(config)

    def weights():
        q, k, _ = model.transformer.h[0].attn.c_attn.weight.T.chunk(3)
        return by_head(q, HEADS), by_head(k, HEADS)

    return Family(model, "transformer.h.0.attn.c_attn", weights, of_language(model))


def llama(**more):
    model = hf.LlamaForCausalLM(hf.LlamaConfig(num_key_value_heads=2, **COMMON, **more))

    def weights():
        attention = model.model.layers[0].self_attn
        return by_head(attention.q_proj.weight, HEADS), shared(by_head(attention.k_proj.weight, 2))

    return Family(model, "model.layers.0.self_attn.q_proj", weights, of_language(model), rotary=True)


def neox(**more):
    model = hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(attention_dropout=0.0, hidden_dropout=0.0, **COMMON, **more))

    def weights():
        by_turn = by_head(model.gpt_neox.layers[0].attention.query_key_value.weight, HEADS)  # (heads, q k v, n)
        return by_turn[:, :SIZE], by_turn[:, SIZE : 2 * SIZE]

    return Family(model, "gpt_neox.layers.0.attention.query_key_value", weights, of_language(model), rotary=True)


def bert(**more):
    none = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    model = hf.BertForMaskedLM(hf.BertConfig(**none, **COMMON, **more))

    def weights():
        attention = model.bert.encoder.layer[0].attention.self
        return by_head(attention.query.weight, HEADS), by_head(attention.key.weight, HEADS)

    def loss():
        mask = torch.ones(3, LENGTH, dtype=torch.long)
        mask[1, 7:] = 0
        return model(input_ids=ids(), attention_mask=mask, labels=ids()).loss

    return Family(model, "bert.encoder.layer.0.attention.self.query", weights, loss)


def timm_vit(**more):
    timm = import_timm()
    if timm is None:
        pytest.skip("timm is not installed")
    from timm.models.vision_transformer import VisionTransformer

    model = VisionTransformer(
        img_size=8, patch_size=4, embed_dim=WIDTH, depth=2, num_heads=HEADS, num_classes=5, **more
    )

    def weights():
        q, k, _ = model.blocks[0].attn.qkv.weight.chunk(3)
        return by_head(q, HEADS), by_head(k, HEADS)

    pictures = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(5))
    return Family(model, "blocks.0.attn.qkv", weights, lambda: model(pictures).square().mean())


def of_torch(**more):
    """torch's own encoder, causal by its mask."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, dropout=0.0, **more)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(LENGTH, 3, WIDTH, generator=torch.Generator().manual_seed(5))
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)

    def weights():
        q, k, _ = model.layers[0].self_attn.in_proj_weight.chunk(3)
        return by_head(q, HEADS), by_head(k, HEADS)

    given = x.transpose(0, 1) if more.get("batch_first") else x
    return Family(model, "layers.0.self_attn.in_proj", weights, lambda: model(given, mask=mask).square().mean())


def x_transformers(**more):
    xt = pytest.importorskip("x_transformers")
    layers = xt.Decoder(dim=WIDTH, depth=2, heads=HEADS, attn_dim_head=SIZE, attn_kv_heads=2, **more)
    model = xt.TransformerWrapper(num_tokens=TOKENS, max_seq_len=LENGTH, attn_layers=layers)

    def weights():
        attention = model.attn_layers.layers[0][1]
        keys = by_head(attention.to_k.weight, 2)
        return by_head(attention.to_q.weight, HEADS), torch.cat([keys, keys])  # whose heads take turns

    def loss():
        return nn.functional.cross_entropy(model(ids()).flatten(0, 1), ids().flatten())

    return Family(model, "attn_layers.layers.0.1.to_q", weights, loss, rotary=True)


FAMILIES = {
    "gpt2": gpt2,
    "llama": llama,
    "neox": neox,
    "bert": bert,
    "timm": timm_vit,
    "torch": of_torch,
    "x_transformers": x_transformers,
}


def make(name, **more):
    torch.manual_seed(1)
    family = FAMILIES[name](**more)
    for parameter in family.model.parameters():  # large enough for logits of order 1
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.3)
    family.model.train()
    return family
