"""Short names beside pictures: every layer can still be told from every other."""

from __future__ import annotations

import random
import re
from itertools import pairwise

import pytest

from spectral_monitor.reporting.content.families import families_of
from spectral_monitor.reporting.content.labels import MAX_NAME_LENGTH, rows_with_names, shortened

BLOCK = ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense")
BLOCK += ("intermediate.dense", "output.dense")
BART = [f"{attention}.{part}_proj" for attention in ("self_attn", "encoder_attn") for part in ("q", "k", "v", "out")]
LONG = "model.encoder_with_a_rather_long_name.transformer_block_number_{}.self_attention_output_projection_dense"
NETWORKS = {
    "perceptron": ("net.0", "net.2", "net.4"),
    "bert": (
        *(f"bert.embeddings.{part}_embeddings" for part in ("word", "position", "token_type")),
        *(f"bert.encoder.layer.{i}.{part}" for i in range(12) for part in BLOCK),
        "bert.pooler.dense",
        "classifier",
    ),
    "queries and keys": (
        *(f"bert.encoder.layer.{i}.attention.self.{part}" for i in range(12) for part in ("query", "key")),
        "bert.classifier",
    ),
    "vit": (
        "vit.embeddings.patch_embeddings.projection",
        *(f"vit.encoder.layer.{i}.{part.replace('self', 'attention')}" for i in range(12) for part in BLOCK),
        "classifier",
    ),
    "bart": (
        "model.shared",
        *(f"model.encoder.layers.{i}.{part}" for i in range(12) for part in (*BART[:4], "fc1", "fc2")),
        *(f"model.decoder.layers.{i}.{part}" for i in range(12) for part in (*BART, "fc1", "fc2")),
        "lm_head",
    ),
    "gpt2": (
        "transformer.wte",
        "transformer.wpe",
        *(
            f"transformer.h.{i}.{p}"
            for i in range(48)
            for p in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
        ),
        "lm_head",
    ),
    "peft": (
        *(
            f"base_model.model.model.layers.{i}.{part}.{of}"
            for i in range(32)
            for part in ("self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj")
            for of in ("base_layer", "lora_A.default", "lora_B.default")
        ),
        "base_model.model.lm_head",
    ),
    "stages": tuple(f"swin.encoder.layers.{i}.blocks.{k}.attention.self.query" for i in range(4) for k in range(6)),
    "words": (*(LONG.format(i) for i in range(6)), "readout"),
    "one": (LONG.format(0),),
    "a matrix and its parts": ("", "encoder", *(f"encoder.{i}.a_part_of_a_very_long_name_indeed" for i in range(3))),
    "deep": (*(f"blocks.{i}" for i in range(200)), "head"),
    "deep and long": tuple(f"a_very_long_backbone_name.blocks.{i}.attention.projection" for i in range(200)),
}


def numbers(name):
    return re.findall(r"\d+", name)


@pytest.mark.parametrize("room", [22, MAX_NAME_LENGTH])
@pytest.mark.parametrize("network", NETWORKS)
def test_no_two_are_alike_and_all_have_room(network, room):
    names = NETWORKS[network]
    short = shortened(names, room)
    assert tuple(short) == names
    assert len(set(short.values())) == len(names)
    assert max(map(len, short.values())) <= room
    for name, label in short.items():
        assert label == name if len(name) <= 3 else label.replace("…", ""), "something is left of it"
        assert re.fullmatch(".*".join(map(re.escape, label.split("…"))), name), "nothing but … is put in"
        assert "……" not in label


@pytest.mark.parametrize("room", [22, MAX_NAME_LENGTH])
@pytest.mark.parametrize("network", NETWORKS)
def test_numbers_in_which_layers_differ_stay(network, room):
    names = NETWORKS[network]
    short = shortened(names, room)
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(re.sub(r"\d+", "#", name), []).append(name)
    for family in alike.values():
        different = [len(set(column)) > 1 for column in zip(*map(numbers, family), strict=True)]
        for name in family:
            kept = numbers(short[name])
            for number, differs in zip(numbers(name), different, strict=True):
                assert not differs or number in kept, (name, short[name])
        assert len({re.sub(r"\d+", "#", short[name]) for name in family}) == 1, "layers of a kind are cut alike"


def test_numbers_stay_where_other_parts_would_do():
    names = [f"net.0.{part}.projection" for part in ("attention", "convolution", "feedforward")]
    labels = shortened((*names, "net.1.normalization.projection"), 14).values()
    assert [numbers(label) for label in labels] == [["0"], ["0"], ["0"], ["1"]]


@pytest.mark.parametrize("network", NETWORKS)
def test_the_order_of_layers_changes_nothing(network):
    names = list(NETWORKS[network])
    random.Random(0).shuffle(names)
    assert shortened(tuple(names)) == shortened(NETWORKS[network])


def test_what_has_room_is_left_as_it_is():
    for names in (NETWORKS["perceptron"], NETWORKS["deep"], ("transformer.h.11.attn.c_attn",)):
        assert all(name == label for name, label in shortened(names).items())


def test_what_is_to_be_read():
    def of(network, name):
        return shortened(NETWORKS[network])[name]

    assert of("bert", "bert.encoder.layer.10.attention.self.query") == "bert…10.attention.self.query"
    assert of("bart", "model.encoder.layers.3.self_attn.q_proj") == "model.encoder…3.self…q_proj"
    assert of("bart", "model.decoder.layers.3.encoder_attn.q_proj") == "…decoder…3.encoder…q_proj"
    assert of("words", LONG.format(3)) == "model…3…projection_dense"
    assert of("one", LONG.format(0)) == "…output_projection_dense"
    query = "bert.encoder.layer.*.attention.self.query"
    assert shortened(tuple(families_of(NETWORKS["queries and keys"])))[query] == "bert…*.attention.self.query"


def test_where_names_would_be_the_same_they_are_longer():
    """Words that nothing but their middle tells apart, and one that is called what another would be cut to."""
    names = tuple(f"{'x' * 40}{letter}{'y' * 40}" for letter in "abc")
    assert len(set(shortened(names).values())) == 3
    cut = shortened((LONG.format(0),))[LONG.format(0)]
    both = shortened((LONG.format(0), cut))
    assert both[cut] == cut
    assert both[LONG.format(0)] != cut


def test_names_for_which_there_is_room():
    for count in (1, 7, 100, 1000):
        for outside in ([], [0], [3, 4, 5], list(range(50, 90)), list(range(1000))):
            marked = [i in outside for i in range(count)]
            rows = rows_with_names(marked, 38)
            assert len(rows) <= 38 or len(rows) == count
            apart = -(-count // 38)
            assert all(b - a >= apart for a, b in pairwise(rows))
            assert any(i > count - 1 - apart for i in rows), "the last one, or one beside it that is outside"
            for i in outside:
                assert i >= count or any(abs(i - k) < apart and marked[k] for k in rows)
    assert rows_with_names([], 5) == []
