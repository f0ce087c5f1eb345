"""Experts in one 3-D parameter: orientation and gate, checked by what the models compute."""

from __future__ import annotations

import math

import pytest
import torch
import transformers as hf
from torch import nn

from spectral_monitor import SpectralProbe
from spectral_monitor.layers import dissect

E, WIDTH, INNER, TOKENS = 3, 8, 6, 11
SIZES = {
    "vocab_size": TOKENS,
    "hidden_size": WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 16,
    "num_experts_per_tok": 1,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


def mixtral():
    return hf.MixtralForCausalLM(hf.MixtralConfig(**SIZES, intermediate_size=INNER, num_local_experts=E))


def qwen3():
    config = hf.Qwen3MoeConfig(**SIZES, moe_intermediate_size=INNER, num_experts=E, decoder_sparse_step=1)
    return hf.Qwen3MoeForCausalLM(config)


def olmoe():
    return hf.OlmoeForCausalLM(hf.OlmoeConfig(**SIZES, intermediate_size=INNER, num_experts=E))


def gpt_oss():
    return hf.GptOssForCausalLM(hf.GptOssConfig(**SIZES, intermediate_size=INNER, num_local_experts=E))


def llama4():
    config = hf.Llama4TextConfig(
        **SIZES, intermediate_size=INNER, intermediate_size_mlp=INNER, num_local_experts=E, moe_layers=[0]
    )
    return hf.Llama4ForCausalLM(config)


MODELS = [mixtral, qwen3, olmoe, gpt_oss, llama4]


def built(make):
    torch.manual_seed(0)
    model = make().double().eval()
    model.config._experts_implementation = "eager"  # the others know no double precision
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "bias" in name:
                p.zero_()
            elif p.ndim > 1:
                p.normal_(std=0.5)
    return model


def output(model):
    return model(torch.arange(TOKENS).unsqueeze(0)).logits


def expert_layers(model):
    layers = {
        layer.info.name.rpartition(".")[2]: layer for layer in dissect(model).layers if ".experts." in layer.info.name
    }
    return layers["gate_up_proj"], layers["down_proj"]


def entries(layer, blocks):
    """Mask, of the parameter's shape, of the entries of some blocks."""
    numbers = torch.arange(math.prod(layer.info.shape), dtype=torch.float64).reshape(layer.info.shape)
    mask = torch.zeros(numbers.numel(), dtype=torch.bool)
    mask[layer.layout.stack(numbers)[0, blocks].flatten().long()] = True
    return mask.reshape(layer.info.shape)


def depends(make, key, zero, on):
    """Whether the output depends on the blocks ``on`` of every expert when its blocks ``zero`` are zero."""
    model = built(make)
    layer = expert_layers(model)[key]
    every = [slice(start, None, layer.info.blocks // E) for start in range(layer.info.blocks // E)]
    with torch.no_grad():
        if zero is not None:
            layer.sources[0][entries(layer, every[zero])] = 0
        before = output(model)
        layer.sources[0][entries(layer, every[on])] *= -3
        return not torch.allclose(before, output(model), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("make", MODELS)
def test_every_expert_is_a_block(make):
    gate_up, down = expert_layers(built(make))
    assert (gate_up.info.fan_in, gate_up.info.fan_out, gate_up.info.blocks) == (WIDTH, INNER, 2 * E)
    assert (down.info.fan_in, down.info.fan_out, down.info.blocks) == (INNER, WIDTH, E)
    turns = " by turns" if make is gpt_oss else ""
    assert gate_up.note == f"gate and up of 3 experts, 6 blocks{turns}"
    assert down.note == "3 experts, a block each"
    for layer in (gate_up, down):
        for expert in range(E):  # the matrices of an expert are its own
            per = layer.info.blocks // E
            mask = entries(layer, slice(per * expert, per * (expert + 1)))
            assert mask[expert].all()
            assert mask.sum() == mask[expert].numel()


@pytest.mark.parametrize("make", MODELS)
def test_gate_and_up(make):
    assert depends(make, 0, None, 0)
    assert depends(make, 0, None, 1)
    assert not depends(make, 0, 0, 1)  # a closed gate lets nothing through
    assert depends(make, 0, 1, 0) == (make is gpt_oss)  # which adds one to what is gated


@pytest.mark.parametrize("make", MODELS)
def test_norms_of_a_step_are_those_of_the_worst_expert(make):
    model = built(make).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities="light")
    old = {id(p): p.detach().clone() for p in model.parameters()}
    with probe.step():
        output(model).square().mean().backward()
        optimizer.step()
    for layer in expert_layers(model):
        (p,) = layer.sources
        dW = p.detach() - old[id(p)]
        out = 2 if tuple(p.shape[1:]) in [(WIDTH, 2 * INNER), (INNER, WIDTH)] else 1
        parts = list(dW.unbind())
        if "gate_up" in layer.info.name:
            halves = [(0, None, 2), (1, None, 2)] if make is gpt_oss else [(0, INNER), (INNER, None)]
            parts = [one[:, slice(*h)] if out == 2 else one[slice(*h)] for one in parts for h in halves]
        norm = max(float(torch.linalg.matrix_norm(part, 2)) for part in parts)
        assert probe.latest.value("update_norm", layer.info.name) == pytest.approx(norm, rel=1e-5)
        natural = norm * math.sqrt(layer.info.fan_in / layer.info.fan_out)
        assert probe.latest.value("update_natural", layer.info.name) == pytest.approx(natural, rel=1e-5)
        assert probe.latest.why("feature_rms", layer.info.name) == "feature_rms was not measured at this step"
    assert all(map(math.isfinite, probe.latest.values["update_norm"][[x.is_matrix for x in probe.anatomy.layers]]))


def test_biases_of_experts_are_vectors():
    biases = [info for info in dissect(gpt_oss()).infos if "experts" in info.name and "bias" in info.name]
    assert [(info.role, info.fan_out) for info in biases] == [("vector", E * 2 * INNER), ("vector", E * WIDTH)]


class Own(nn.Module):
    """Parameters of the shapes given."""

    def __init__(self, says=None, **shapes):
        super().__init__()
        for key, shape in shapes.items():
            setattr(self, key, nn.Parameter(torch.randn(shape)))
        if says is not None:
            self.is_transposed = says
        self.head = nn.Linear(2, 2, bias=False)


@pytest.mark.parametrize(
    ("model", "fans"),
    [
        (Own(gate_up_proj=(3, 12, 8), down_proj=(3, 8, 6)), [(8, 6, 6), (6, 8, 3)]),
        (Own(gate_up_proj=(3, 8, 12), down_proj=(3, 6, 8)), [(8, 6, 6), (6, 8, 3)]),
        (Own(True, gate_up_proj=(3, 8, 12), down_proj=(3, 6, 8)), [(8, 6, 6), (6, 8, 3)]),
        (Own(False, gate_up_proj=(3, 8, 12), down_proj=(3, 6, 8)), []),
        (Own(gate_up_proj=(3, 12, 8), down_proj=(3, 8, 7)), []),
        (Own(gate_up_proj=(3, 12, 8), down_proj=(2, 8, 6)), []),
        (Own(gate_up_proj=(3, 12, 8), down_proj=(8, 6)), [(6, 8, 1)]),
        (Own(up_proj=(3, 6, 8), down_proj=(3, 8, 6)), []),
        (Own(False, up_proj=(3, 6, 8), down_proj=(3, 8, 6)), [(8, 6, 3), (6, 8, 3)]),
        (Own(True, up_proj=(3, 8, 6), down_proj=(3, 6, 8)), [(8, 6, 3), (6, 8, 3)]),
        (Own(False, gate_up_proj=(3, 5, 8)), []),
    ],
)
def test_shapes_and_attributes_decide(model, fans):
    anatomy = dissect(model)
    found = [(i.fan_in, i.fan_out, i.blocks) for i in anatomy.infos if i.name != "head"]
    assert found == fans
    reason = "3-D parameter of Own: it is not known which axes are inputs and outputs"
    assert {item.reason for item in anatomy.unmeasured} <= {reason}
    assert len(found) + len(anatomy.unmeasured) == sum(key != "head.weight" for key, _ in model.named_parameters())
