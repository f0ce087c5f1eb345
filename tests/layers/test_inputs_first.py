"""Matrices of a state_dict that are (in, out): only the length of a bias tells."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from spectral_monitor import inspect

OWN, BESIDE = "inputs first, judging by its bias", "inputs first, judging by neighbouring biases"
SIZES = {"attn": {"c_attn": (16, 48), "c_proj": (16, 16)}, "mlp": {"c_fc": (16, 64), "c_proj": (64, 16)}}


def linears(bias=True):
    """Return two blocks of nn.Linear under the names that Hugging Face's GPT-2 has."""
    blocks = [
        nn.ModuleDict(
            {
                block: nn.ModuleDict({name: nn.Linear(*size, bias=bias) for name, size in sizes.items()})
                for block, sizes in SIZES.items()
            }
        )
        for _ in range(2)
    ]
    return nn.ModuleDict({"wte": nn.Embedding(50, 16), "h": nn.ModuleList(blocks), "lm_head": nn.Linear(16, 50, False)})


def matrices(found):
    """Return shape and numbers of every matrix."""
    return {
        layer.name: ((layer.fan_in, layer.fan_out, layer.blocks), found[layer.name])
        for layer in found.measurement.layers
        if layer.is_matrix
    }


def notes(model):
    """Return the note of every matrix in the table."""
    columns = {column.title: column.cells for column in inspect(model).rows().columns}
    return dict(zip(columns["layer"], columns.get("note", [""] * len(columns["layer"])), strict=True))


def test_gpt2_of_hugging_face():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    known, found = matrices(inspect(model)), matrices(inspect(model.state_dict()))
    assert found.keys() == known.keys()
    for name, (shape, values) in known.items():
        assert found[name][0] == shape, name
        assert found[name][1] == pytest.approx(values, nan_ok=True), name
    assert known["transformer.h.1.mlp.c_fc"][0] == (16, 64, 1)
    said = notes(model.state_dict())
    assert said["transformer.h.1.attn.c_attn"] == f"query, key and value; {OWN}"
    assert said["transformer.h.0.mlp.c_proj"] == OWN
    assert said["transformer.h.0.attn.c_proj"] == BESIDE, "square"
    assert not any("inputs first" in said[name] for name in ("transformer.wte", "lm_head"))


@pytest.mark.parametrize("bias", [True, False])
def test_the_same_names_with_linear_layers(bias):
    model = linears(bias)
    assert matrices(inspect(model.state_dict())) == matrices(inspect(model))
    assert not any("inputs first" in note for note in notes(model.state_dict()).values())


def test_square_ones_follow_only_those_that_agree():
    def of(**shapes):
        state = {f"h.{i}.{name}.weight": torch.ones(shape) for name, shape in shapes.items() for i in range(2)}
        state["head.weight"] = torch.ones(2, 8)
        return {**state, **{f"h.{i}.{name}.bias": torch.ones(8) for name in shapes for i in range(2)}}

    assert notes(of(a=(4, 8), b=(8, 8)))["h.1.b"] == BESIDE
    said = notes(of(a=(4, 8), b=(8, 8), c=(8, 4)))
    assert [said[f"h.1.{name}"] for name in "ab"] == [OWN, ""], "c is (out, in)"
    assert not any("inputs first" in note for note in notes(of(b=(8, 8), c=(8, 4))).values())
    bare = {name: value for name, value in of(a=(4, 8), b=(8, 8)).items() if name != "h.1.b.bias"}
    assert "inputs first" not in notes(bare)["h.1.b"], "without a bias it is like none of them"


def test_tables_and_odd_biases_tell_nothing():
    state = {"wte.weight": torch.ones(9, 4), "wte.bias": torch.ones(4), "fc.weight": torch.ones(4, 4)}
    state |= {"fc.bias": torch.ones(4), "odd.weight": torch.ones(3, 5), "odd.bias": torch.ones(7)}
    assert not any("inputs first" in note for note in notes(state).values())
