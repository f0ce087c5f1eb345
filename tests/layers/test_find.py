"""What every kind of parameter is taken for, under which name, and what is refused."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, parametrize, prune
from transformers import GPT2Config, GPT2LMHeadModel

from spectral_monitor.layers import dissect
from spectral_monitor.layers.inspect_model import PART_OF
from spectral_monitor.layers.output_layers import Operator
from spectral_monitor.reporting.text.lines import NO_FEATURES
from spectral_monitor.reporting.text.role_table import role_table

IN_PLACE = "guessed: the last matrix"
PARAMETRIZED = "parametrized: the weight in use is computed from it"
UNINITIALISED = "not initialized: run one batch through the model first"
NO_CALL = "no module call to hook"


class Bare(nn.Module):
    """Parameters without a module that uses them."""

    def __init__(self, **parameters):
        super().__init__()
        for name, value in parameters.items():
            trainable = value.is_floating_point() or value.is_complex()
            setattr(self, name, nn.Parameter(value, requires_grad=trainable))


class Holder(nn.Module):
    """A module with one child under a name of the user's choice."""

    def __init__(self, name, child):
        super().__init__()
        setattr(self, name, child)


def old_style(apply, module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return apply(module)


def tied():
    model = nn.ModuleDict({"table": nn.Embedding(7, 4), "head": nn.Linear(4, 7, bias=False)})
    model["head"].weight = model["table"].weight
    return model


def shared():
    layer = nn.Linear(3, 3)
    return nn.ModuleDict({"first": layer, "again": layer, "other": nn.Linear(3, 2)})


def pruned():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    prune.l1_unstructured(model[0], "weight", 2)
    return model


class LowRank(nn.Module):
    def __init__(self, m, n):
        super().__init__()
        self.down, self.up = nn.Parameter(torch.randn(1, n)), nn.Linear(1, m, bias=False)

    def forward(self, weight):
        return weight + self.up.weight @ self.down


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


class Failing(nn.Module):
    fails = False

    def forward(self, weight):
        if self.fails:
            raise RuntimeError("no")
        return weight


class Complex(nn.Module):
    def forward(self, weight):
        return weight + 0j


def low_rank():
    model = nn.ModuleDict({"inner": nn.Linear(4, 3), "head": nn.Linear(3, 2, bias=False)})
    parametrize.register_parametrization(model["inner"], "weight", LowRank(3, 4))
    return model


def parametrized_elsewhere():
    parts = {"table": nn.Embedding(7, 4), "gru": nn.GRU(4, 4, bias=False), "head": nn.Linear(4, 2)}
    parametrizations.spectral_norm(parts["table"])
    parametrizations.weight_norm(parts["gru"], "weight_hh_l0")
    parametrize.register_parametrization(parts["head"], "bias", Doubled())
    return nn.ModuleDict(parts)


def unfit_parametrizations():
    parts = {name: nn.Linear(3, 2, bias=False) for name in ("bad", "complex", "good")}
    parametrize.register_parametrization(parts["bad"], "weight", Failing())
    parametrize.register_parametrization(parts["complex"], "weight", Complex(), unsafe=True)
    parts["bad"].parametrizations.weight[0].fails = True
    return nn.ModuleDict(parts)


def hooked_by_hand():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, bias=False))
    model[0].weight_orig = model[0]._parameters.pop("weight")
    model[0].weight = model[0].weight_orig * 2
    return model


def gpt2():
    config = GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=11, n_positions=6, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


def mixed():
    weights = {"w": torch.randn(3, 4), "i": torch.zeros(3, 3, dtype=torch.long), "e": torch.zeros(0, 3)}
    model = Bare(**weights, c=torch.zeros(3, 3, dtype=torch.complex64))
    model.f = nn.Parameter(torch.zeros(3, 3).to(torch.float8_e4m3fn), requires_grad=False)
    return model


# Model -> what is measured: (name, role, fan_in, fan_out, blocks); what is not: name -> reason.
MODELS = {
    "linear": (
        lambda: nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)),
        [
            ("0", "operator", 3, 5, 1),
            ("0.bias", "vector", 1, 5, 1),
            ("2", "readout", 5, 2, 1),
            ("2.bias", "vector", 1, 2, 1),
        ],
        {},
    ),
    "a single layer": (
        lambda: nn.Linear(3, 2),
        [("weight", "readout", 3, 2, 1), ("bias", "vector", 1, 2, 1)],
        {},
    ),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv1d(4, 6, 3, bias=False),
            nn.Conv2d(4, 6, 3, groups=2, bias=False),
            nn.Conv3d(4, 6, 1, bias=False),
            nn.ConvTranspose1d(4, 6, 3, bias=False),
            nn.ConvTranspose2d(4, 6, 3, groups=2, bias=False),
            nn.ConvTranspose3d(4, 6, 2, bias=False),
            nn.Conv2d(4, 8, 3, groups=4, bias=False),
        ),
        [
            ("0", "operator", 4, 6, 1),
            ("1", "operator", 2, 3, 2),
            ("2", "operator", 4, 6, 1),
            ("3", "operator", 4, 6, 1),
            ("4", "operator", 2, 3, 2),
            ("5", "operator", 4, 6, 1),
            ("6", "readout", 1, 2, 4),
        ],
        {},
    ),
    "embeddings": (
        lambda: nn.ModuleDict({"e": nn.Embedding(7, 4), "bag": nn.EmbeddingBag(9, 5), "out": nn.Linear(5, 7)}),
        [
            ("e", "embedding", 1, 4, 1),
            ("bag", "embedding", 1, 5, 1),
            ("out", "readout", 5, 7, 1),
            ("out.bias", "vector", 1, 7, 1),
        ],
        {},
    ),
    "norms": (
        lambda: nn.Sequential(
            nn.BatchNorm2d(4),
            nn.GroupNorm(2, 4, affine=True),
            nn.LayerNorm((2, 3)),
            nn.LayerNorm((2, 3, 4), bias=False),
            nn.RMSNorm(4),
            nn.PReLU(),
        ),
        [
            ("0.weight", "vector", 1, 4, 1),
            ("0.bias", "vector", 1, 4, 1),
            ("1.weight", "vector", 1, 4, 1),
            ("1.bias", "vector", 1, 4, 1),
            ("2.weight", "vector", 1, 6, 1),
            ("2.bias", "vector", 1, 6, 1),
            ("3.weight", "vector", 1, 24, 1),
            ("4.weight", "vector", 1, 4, 1),
            ("5.weight", "vector", 1, 1, 1),
        ],
        {},
    ),
    "attention, fused": (
        lambda: nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2), "head": nn.Linear(8, 3, bias=False)}),
        [
            ("attention.in_proj", "operator", 8, 8, 3),
            ("attention.in_proj_bias", "vector", 1, 24, 1),
            ("attention.out_proj", "operator", 8, 8, 1),
            ("attention.out_proj.bias", "vector", 1, 8, 1),
            ("head", "readout", 8, 3, 1),
        ],
        {},
    ),
    "attention, kdim and vdim": (
        lambda: nn.MultiheadAttention(8, 2, kdim=6, vdim=4, add_bias_kv=True, bias=False),
        [
            ("q_proj", "operator", 8, 8, 1),
            ("k_proj", "operator", 6, 8, 1),
            ("v_proj", "operator", 4, 8, 1),
            ("bias_k", "vector", 1, 8, 1),
            ("bias_v", "vector", 1, 8, 1),
            ("out_proj", "operator", 8, 8, 1),
        ],
        {},
    ),
    "GPT-2": (
        gpt2,
        [
            ("transformer.wte", "embedding", 1, 8, 1),
            ("transformer.wpe", "embedding", 1, 8, 1),
            ("transformer.h.0.ln_1.weight", "vector", 1, 8, 1),
            ("transformer.h.0.ln_1.bias", "vector", 1, 8, 1),
            ("transformer.h.0.attn.c_attn", "operator", 8, 8, 3),
            ("transformer.h.0.attn.c_attn.bias", "vector", 1, 24, 1),
            ("transformer.h.0.attn.c_proj", "operator", 8, 8, 1),
            ("transformer.h.0.attn.c_proj.bias", "vector", 1, 8, 1),
            ("transformer.h.0.ln_2.weight", "vector", 1, 8, 1),
            ("transformer.h.0.ln_2.bias", "vector", 1, 8, 1),
            ("transformer.h.0.mlp.c_fc", "operator", 8, 32, 1),
            ("transformer.h.0.mlp.c_fc.bias", "vector", 1, 32, 1),
            ("transformer.h.0.mlp.c_proj", "operator", 32, 8, 1),
            ("transformer.h.0.mlp.c_proj.bias", "vector", 1, 8, 1),
            ("transformer.ln_f.weight", "vector", 1, 8, 1),
            ("transformer.ln_f.bias", "vector", 1, 8, 1),
            ("lm_head", "readout", 8, 11, 1),
        ],
        {},
    ),
    "recurrent": (
        lambda: nn.ModuleDict(
            {
                "lstm": nn.LSTM(4, 6, proj_size=3, bias=False, bidirectional=True),
                "gru": nn.GRU(4, 6, bias=False),
                "rnn": nn.RNN(4, 6),
            }
        ),
        [
            ("lstm.weight_ih_l0", "operator", 4, 6, 4),
            ("lstm.weight_hh_l0", "operator", 3, 6, 4),
            ("lstm.weight_hr_l0", "operator", 6, 3, 1),
            ("lstm.weight_ih_l0_reverse", "operator", 4, 6, 4),
            ("lstm.weight_hh_l0_reverse", "operator", 3, 6, 4),
            ("lstm.weight_hr_l0_reverse", "operator", 6, 3, 1),
            ("gru.weight_ih_l0", "operator", 4, 6, 3),
            ("gru.weight_hh_l0", "operator", 6, 6, 3),
            ("rnn.weight_ih_l0", "operator", 4, 6, 1),
            ("rnn.weight_hh_l0", "operator", 6, 6, 1),
            ("rnn.bias_ih_l0", "vector", 1, 6, 1),
            ("rnn.bias_hh_l0", "vector", 1, 6, 1),
        ],
        {},
    ),
    "recurrent cells": (
        lambda: nn.Sequential(
            nn.LSTMCell(3, 4, bias=False), nn.GRUCell(3, 4, bias=False), nn.RNNCell(3, 4, bias=False)
        ),
        [
            ("0.weight_ih", "operator", 3, 4, 4),
            ("0.weight_hh", "operator", 4, 4, 4),
            ("1.weight_ih", "operator", 3, 4, 3),
            ("1.weight_hh", "operator", 4, 4, 3),
            ("2.weight_ih", "operator", 3, 4, 1),
            ("2.weight_hh", "operator", 4, 4, 1),
        ],
        {},
    ),
    "bare parameters": (
        lambda: Bare(
            w=torch.randn(3, 4),
            pos_embed=torch.randn(1, 5, 4),
            class_token=torch.randn(1, 1, 4),
            mixing=torch.randn(1, 5, 4),
            row=torch.randn(1, 4),
            gain=torch.randn(4, 1, 1),
            scale=torch.tensor(1.0),
            three=torch.randn(2, 3, 4),
        ),
        [
            ("w", "operator", 4, 3, 1),
            ("pos_embed", "embedding", 1, 4, 1),
            ("class_token", "vector", 1, 4, 1),
            ("mixing", "operator", 4, 5, 1),
            ("row", "operator", 4, 1, 1),
            ("gain", "vector", 1, 4, 1),
            ("scale", "vector", 1, 1, 1),
        ],
        {"three": "3-D parameter of Bare: it is not known which axes are inputs and outputs"},
    ),
    "parameter lists": (
        lambda: nn.ModuleDict({"p": nn.ParameterList([torch.randn(3, 4), torch.randn(3)]), "b": nn.Bilinear(2, 3, 4)}),
        [("p.0", "operator", 4, 3, 1), ("p.1", "vector", 1, 3, 1), ("b.bias", "vector", 1, 4, 1)],
        {"b.weight": "3-D parameter of Bilinear: it is not known which axes are inputs and outputs"},
    ),
    "parametrized": (
        lambda: nn.Sequential(
            old_style(nn.utils.weight_norm, nn.Linear(3, 3, bias=False)),
            parametrizations.weight_norm(nn.Linear(3, 3, bias=False)),
            old_style(nn.utils.spectral_norm, nn.Linear(3, 3, bias=False)),
            parametrizations.spectral_norm(nn.Linear(3, 3, bias=False)),
            nn.Linear(3, 2, bias=False),
        ),
        [(str(i), "operator", 3, 3, 1) for i in range(4)] + [("4", "readout", 3, 2, 1)],
        {
            "0.weight_g": "part of the weight of 0",
            "0.weight_v": "part of the weight of 0",
            "1.parametrizations.weight.original0": "part of the weight of 1",
            "1.parametrizations.weight.original1": "part of the weight of 1",
            "2.weight_orig": "part of the weight of 2",
            "3.parametrizations.weight.original": "part of the weight of 3",
        },
    ),
    "parametrized by modules with weights of their own": (
        low_rank,
        [("inner", "operator", 4, 3, 1), ("inner.bias", "vector", 1, 3, 1), ("head", "readout", 3, 2, 1)],
        {
            "inner.parametrizations.weight.original": "part of the weight of inner",
            "inner.parametrizations.weight.0.down": "part of the weight of inner",
            "inner.parametrizations.weight.0.up.weight": "part of the weight of inner",
        },
    ),
    "a parametrized embedding, bias and recurrence": (
        parametrized_elsewhere,
        [
            ("table", "embedding", 1, 4, 1),
            ("gru.weight_hh_l0", "operator", 4, 4, 3),
            ("gru.weight_ih_l0", "operator", 4, 4, 3),
            ("head.bias", "vector", 1, 2, 1),
            ("head", "readout", 4, 2, 1),
        ],
        {
            "table.parametrizations.weight.original": "part of the weight of table",
            "gru.parametrizations.weight_hh_l0.original0": "part of the weight of gru.weight_hh_l0",
            "gru.parametrizations.weight_hh_l0.original1": "part of the weight of gru.weight_hh_l0",
            "head.parametrizations.bias.original": "part of the weight of head.bias",
        },
    ),
    "a parametrization that fails, or is not real": (
        unfit_parametrizations,
        [("good", "readout", 3, 2, 1)],
        {
            "bad.parametrizations.weight.original": "the weight computed from it is not known (RuntimeError: no)",
            "complex.weight": "dtype torch.complex64 is not real floating point",
            "complex.parametrizations.weight.original": "part of the weight of complex.weight",
        },
    ),
    "hooks nobody knows": (
        hooked_by_hand,
        [("0.bias", "vector", 1, 2, 1), ("1", "readout", 2, 2, 1)],
        {"0.weight_orig": PARAMETRIZED},
    ),
    "pruned": (
        pruned,
        [
            ("0", "operator", 3, 4, 1),
            ("0.bias", "vector", 1, 4, 1),
            ("1", "readout", 4, 2, 1),
            ("1.bias", "vector", 1, 2, 1),
        ],
        {"0.weight_orig": "part of the weight of 0"},
    ),
    "lazy": (
        lambda: nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2)),
        [("1", "readout", 4, 2, 1), ("1.bias", "vector", 1, 2, 1)],
        {"0.weight": UNINITIALISED, "0.bias": UNINITIALISED},
    ),
    "integer, complex, empty, eight bits": (
        mixed,
        [("w", "operator", 4, 3, 1)],
        {
            "i": "dtype torch.int64 is not real floating point",
            "c": "dtype torch.complex64 is not real floating point",
            "e": "empty",
            "f": "dtype torch.float8_e4m3fn has no meaning without its scales, which are stored elsewhere",
        },
    ),
    "tied": (tied, [("table", "embedding", 1, 4, 1), ("head", "readout", 4, 7, 1)], {}),
    "shared": (
        shared,
        [
            ("first", "operator", 3, 3, 1),
            ("first.bias", "vector", 1, 3, 1),
            ("other", "readout", 3, 2, 1),
            ("other.bias", "vector", 1, 2, 1),
        ],
        {},
    ),
}


def described(anatomy):
    return [(i.name, i.role, i.fan_in, i.fan_out, i.blocks) for i in anatomy.infos]


def layer_of(anatomy, name):
    (layer,) = [layer for layer in anatomy.layers if layer.info.name == name]
    return layer


@pytest.mark.parametrize("kind", MODELS)
def test_every_parameter_is_what_it_is(kind):
    make, measured, unmeasured = MODELS[kind]
    anatomy = dissect(make())
    assert described(anatomy) == measured
    assert {item.name: item.reason for item in anatomy.unmeasured} == unmeasured


CHOICES = [{}, {"exclude": ["*bias*"]}, {"include": ["*e*", "0*", "w*"]}, {"roles": {"*bias*": "ignore"}}]


@pytest.mark.parametrize("chosen", CHOICES, ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_nothing_is_dropped_silently(kind, chosen):
    model = MODELS[kind][0]()
    try:
        anatomy = dissect(model, **chosen)
    except ValueError as error:
        assert "matches no layer" in str(error) or "nothing to measure" in str(error)  # noqa: PT017
        return
    by_name = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in list(by_name.items()):  # a layer is called as its module where that has one matrix
        by_name.setdefault(name.removesuffix(".weight"), parameter)
        by_name.setdefault(name.removesuffix("_weight"), parameter)
    for layer in anatomy.layers:
        assert layer.info.shape == tuple(layer.weight().shape)
        assert layer.compute is not None or layer.sources == (by_name[layer.info.name],)
    covered = [id(source) for layer in anatomy.layers for source in layer.sources]
    covered += [id(by_name[item.name]) for item in anatomy.unmeasured if item.name in by_name]
    assert set(covered) == {id(parameter) for parameter in model.parameters()}
    names = [layer.info.name for layer in anatomy.layers] + [item.name for item in anatomy.unmeasured]
    assert len(names) == len(set(names))
    assert all(item.reason for item in anatomy.unmeasured)
    text = " ".join(role_table(anatomy).split())  # wrapped or not
    parts = [item for item in anatomy.unmeasured if item.reason.startswith(PART_OF)]
    assert all(item.reason in text for item in anatomy.unmeasured if item not in parts)
    assert not parts or f"parts of weights that are measured ({len(parts)}): " in text


@pytest.mark.parametrize(
    ("kind", "name", "note", "no_features"),
    [
        ("linear", "0", "", ""),
        ("linear", "2", IN_PLACE, ""),
        ("linear", "0.bias", "", "a vector has no features of its own"),
        ("convolutions", "0", "3 taps, norms added up", ""),
        ("convolutions", "2", "", ""),
        ("convolutions", "6", f"{IN_PLACE}; 9 taps, norms added up", ""),
        ("attention, fused", "attention.in_proj", "query, key and value", NO_CALL),
        ("attention, fused", "attention.out_proj", "", NO_CALL),
        ("recurrent", "lstm.weight_ih_l0", "4 gates", NO_CALL),
        ("recurrent", "lstm.weight_hr_l0", "", NO_CALL),
        ("bare parameters", "w", "bare parameter, taken for (out, in)", NO_CALL),
        ("bare parameters", "pos_embed", "bare parameter, taken for a table (tokens, d)", NO_CALL),
        ("tied", "head", f"{IN_PLACE}; tied to table", ""),
        ("tied", "table", "", ""),
        ("GPT-2", "lm_head", "tied to transformer.wte", ""),
    ],
)
def test_notes_and_reasons_for_missing_features(kind, name, note, no_features):
    anatomy = dissect(MODELS[kind][0]())
    layer = layer_of(anatomy, name)
    assert (layer.note, layer.no_features) == (note, no_features)
    assert (layer.module is None) == bool(no_features)
    assert layer.tied_to == (note.partition("tied to ")[2] if "tied to" in note else "")
    assert not layer.is_matrix or note in " ".join(role_table(anatomy).split()), "wrapped or not"
    if layer.is_matrix and no_features:
        below = role_table(anatomy, folded=False, width=None).partition(NO_FEATURES)[2]
        assert any(name in line and line.endswith(f": {no_features}") for line in below.splitlines())


def test_frozen_parameters_are_measured_and_noted():
    model = nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 2))
    layers = dissect(model).layers
    assert [layer.note for layer in layers] == ["frozen", "frozen", IN_PLACE, ""]


def test_hooks_belong_to_the_module_whose_calls_are_the_features():
    model = nn.Sequential(nn.Linear(3, 3), nn.Conv1d(3, 3, 1), nn.Embedding(4, 3))
    layers = [layer for layer in dissect(model).layers if layer.is_matrix]
    assert [layer.module for layer in layers] == list(model)
    assert [layer.channels_first for layer in layers] == [False, True, False]


def test_a_lazy_layer_is_measured_once_it_has_a_shape():
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    model(torch.zeros(1, 3))
    assert described(dissect(model))[0] == ("0", "operator", 3, 4, 1)


# ------------------------------------------------------------------------------------------------------------ names


def inner():
    return nn.Sequential(nn.Linear(3, 2, bias=False))


WRAPPED = {
    "DataParallel": (lambda: nn.DataParallel(inner()), ["0"]),
    "torch.compile": (lambda: torch.compile(inner()), ["0"]),
    "compiled inside": (lambda: Holder("net", torch.compile(inner())), ["net.0"]),
    "checkpoint wrapper": (lambda: nn.Sequential(checkpoint_wrapper(nn.Linear(3, 2, bias=False))), ["0"]),
    "DataParallel of compiled": (lambda: nn.DataParallel(torch.compile(inner())), ["0"]),
    "DataParallel inside": (lambda: Holder("net", nn.DataParallel(inner())), ["net.0"]),
    "FSDP's name": (lambda: Holder("_fsdp_wrapped_module", inner()), ["0"]),
    "a user's module": (lambda: Holder("module", inner()), ["module.0"]),
    "a user's module, wrapped": (lambda: nn.DataParallel(Holder("module", inner())), ["module.0"]),
    "a user's model.module.model": (lambda: Holder("a", Holder("module", inner())), ["a.module.0"]),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_names_carry_no_wrapper_prefixes(kind):
    make, names = WRAPPED[kind]
    assert [info.name for info in dissect(make()).infos] == names


def test_a_module_that_overloads_equality_is_found_once():
    class Equal(nn.Linear):
        __hash__ = nn.Module.__hash__

        def __eq__(self, other):
            return True

    model = nn.ModuleDict({"a": Equal(3, 2, bias=False), "b": Equal(3, 2, bias=False)})
    assert [info.name for info in dissect(model).infos] == ["a", "b"]


# ---------------------------------------------------------------------------------------------------------- choices


def two():
    return nn.ModuleDict({"body": nn.Linear(4, 6), "head": nn.Linear(6, 2)})


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        ({"include": ["body"]}, ["body", "body.bias"]),
        ({"include": ["body*"]}, ["body", "body.bias"]),
        ({"include": ["*.bias"]}, ["body.bias", "head.bias"]),
        ({"include": ["body"], "exclude": ["*.bias"]}, ["body"]),
        ({"exclude": ["head"]}, ["body", "body.bias"]),
        ({"exclude": ["head.bias"]}, ["body", "body.bias", "head"]),
        ({"roles": {"head*": "ignore"}}, ["body", "body.bias"]),
        ({"roles": {"body*": "ignore", "head.bias": "ignore"}}, ["head"]),
        ({"include": [], "exclude": []}, ["body", "body.bias", "head", "head.bias"]),
    ],
)
def test_include_exclude_and_ignore(chosen, names):
    anatomy = dissect(two(), **chosen)
    assert [info.name for info in anatomy.infos] == names
    reason = "left out by roles" if "roles" in chosen else "left out by include or exclude"
    assert {item.reason for item in anatomy.unmeasured} <= {reason}
    assert len(anatomy.layers) + len(anatomy.unmeasured) == 4


@pytest.mark.parametrize(
    "chosen",
    [
        {"include": ["d.a[0]"]},
        {"exclude": ["d.b", "d.a[0].bias", "d.b.bias"]},
        {"roles": {"d.a[0]": "output", "*": "ignore"}},
        {"include": ["d.a[0]"], "blocks": {"d.a[0]": 1}},
    ],
    ids=str,
)
def test_a_name_stands_for_itself_whatever_is_in_it(chosen):
    model = nn.ModuleDict({"d": nn.ModuleDict({"a[0]": nn.Linear(4, 6), "b": nn.Linear(6, 2)})})
    assert "d.a[0]" in [info.name for info in dissect(model, **chosen).infos if info.is_matrix]
    assert "d.b" not in [info.name for info in dissect(model, **chosen).infos]


@pytest.mark.parametrize(
    ("make", "roles", "expected"),
    [
        (two, {"body": "embedding"}, ("body", "embedding", 1, 6, 1)),
        (two, {"body": "vector"}, ("body", "vector", 1, 24, 1)),
        (two, {"body": "operator", "*": "ignore"}, ("body", "operator", 4, 6, 1)),
        (lambda: nn.Embedding(7, 4), {"weight": "operator"}, ("weight", "operator", 7, 4, 1)),
        (lambda: nn.Embedding(7, 4), {"weight": "readout"}, ("weight", "readout", 7, 4, 1)),
        (lambda: nn.Embedding(7, 4), {"weight": "embedding"}, ("weight", "embedding", 1, 4, 1)),
        (lambda: nn.Conv1d(4, 6, 3), {"weight": "readout"}, ("weight", "readout", 4, 6, 1)),
        (lambda: Bare(t=torch.randn(2, 3, 4)), {"t": "vector"}, ("t", "vector", 1, 24, 1)),
        (lambda: Bare(wte=torch.randn(7, 4)), {"wte": "embedding"}, ("wte", "embedding", 1, 4, 1)),
        (lambda: Bare(position=torch.randn(7, 4)), {"position": "operator"}, ("position", "operator", 4, 7, 1)),
        (lambda: Bare(pos=torch.randn(1, 7, 4)), {"pos": "vector"}, ("pos", "vector", 1, 28, 1)),
    ],
)
def test_roles_override_the_guess(make, roles, expected):
    assert described(dissect(make(), roles=roles))[0] == expected


def test_a_bare_table_keeps_its_rows():
    model = Bare(wte=torch.randn(7, 4))
    layer = dissect(model, roles={"wte": "embedding"}).layers[0]
    assert torch.equal(layer.layout.stack(layer.weight())[0, 0], model.wte.detach())
    assert layer.note == "bare parameter"


@pytest.mark.parametrize("make", [two, gpt2])
def test_a_readout_that_is_named_is_the_only_one(make):
    name = "body" if make is two else "transformer.wte"
    anatomy = dissect(make(), roles={name: "readout"})
    assert [info.name for info in anatomy.infos if info.role == "readout"] == [name]
    assert not any(IN_PLACE in layer.note for layer in anatomy.layers)


class Adapted(nn.Module):
    """LoRA, written by hand or as peft does it, whose factors stand a module deeper."""

    def __init__(self, base, deeper):
        super().__init__()
        self.base = base.requires_grad_(False)
        down, up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)
        self.lora_A = nn.ModuleDict({"default": down}) if deeper else down
        self.lora_B = nn.ModuleDict({"default": up}) if deeper else up


@pytest.mark.parametrize("deeper", [False, True])
@pytest.mark.parametrize("wide", [True, False])
def test_an_adapter_is_no_readout(deeper, wide):
    """Nor where its outputs are as wide as what the head reads."""
    blocks = nn.ModuleList(Adapted(nn.Linear(8, 24 if wide else 8), deeper) for _ in range(2))
    model = nn.ModuleDict({"blocks": blocks, "norm": nn.LayerNorm(8), "lm_head": nn.Linear(8, 50)})
    model["lm_head"].requires_grad_(False)
    roles = {info.name: info.role for info in dissect(model).infos}
    assert [name for name, role in roles.items() if role == "readout"] == ["lm_head"]


def test_a_trained_head_beside_a_frozen_one_is_a_readout():
    frozen = nn.Linear(8, 5).requires_grad_(False)
    model = nn.ModuleDict({"body": nn.Linear(8, 8), "old": frozen, "new": nn.Linear(8, 5)})
    roles = {info.name: info.role for info in dissect(model).infos}
    assert roles["new"] == "readout"


def test_the_model_says_what_its_readout_is():
    class Speaking(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.later = nn.Linear(4, 2, bias=False), nn.Linear(4, 4, bias=False)

        def get_output_embeddings(self):
            return self.head

    anatomy = dissect(Speaking())
    assert [info.role for info in anatomy.infos] == ["readout", "operator"]
    assert layer_of(anatomy, "head").note == ""


def test_the_first_role_that_matches_holds():
    model = two()
    assert described(dissect(model, roles={"body": "vector", "bod?": "operator"}))[0][1] == "vector"


@pytest.mark.parametrize(
    ("make", "blocks", "expected"),
    [
        (two, {"body": 3}, ("body", "operator", 4, 2, 3)),
        (lambda: nn.MultiheadAttention(4, 2), {"in_proj": 6}, ("in_proj", "operator", 4, 2, 6)),
        (lambda: nn.MultiheadAttention(4, 2), {"in_proj": 1}, ("in_proj", "operator", 4, 12, 1)),
        (lambda: nn.Conv1d(4, 8, 3, groups=2), {"weight": 4}, ("weight", "readout", 2, 2, 4)),
        (lambda: gpt2().transformer.h[0].attn, {"c_attn": 3}, ("c_attn", "operator", 8, 8, 3)),
    ],
)
def test_blocks_override_the_guess(make, blocks, expected):
    assert described(dissect(make(), blocks=blocks))[0] == expected


LAYERS = r"Layers: body, body\.bias, head, head\.bias"
REFUSED = [
    (
        two,
        {"roles": {"body": "operater"}},
        r"roles: 'body': unknown role 'operater'; valid roles: hidden, output, .*ignore",
    ),
    (two, {"roles": {"bodi": "operator"}}, rf"roles: pattern 'bodi' .* Did you mean 'body'\? {LAYERS}"),
    (two, {"blocks": {"heed": 2}}, rf"blocks: pattern 'heed' matches no layer\. Did you mean 'head'\? {LAYERS}"),
    (two, {"include": ["body", "zzz*"]}, rf"include: pattern 'zzz\*' matches no layer\. {LAYERS}"),
    (two, {"exclude": ["body.weight"]}, rf"exclude: pattern 'body.weight' matches no layer.* {LAYERS}"),
    (two, {"roles": {"body.bias": "operator"}}, r"'body.bias' of shape \(6,\) cannot be 'operator'; choose vector or"),
    (two, {"roles": {"body.bias": "embedding"}}, r"roles: 'body.bias' of shape \(6,\) cannot be 'embedding'"),
    (
        lambda: nn.Conv1d(4, 8, 3),
        {"roles": {"weight": "embedding"}},
        r"'weight' of shape \(8, 4, 3\) cannot be 'embedding': it is not a table \(tokens, d\)",
    ),
    (
        lambda: nn.MultiheadAttention(4, 2),
        {"roles": {"in_proj": "embedding"}},
        r"'in_proj' of shape \(12, 4\) cannot be 'embedding'",
    ),
    (
        lambda: Bare(t=torch.randn(2, 3, 4)),
        {"roles": {"t": "readout"}},
        r"'t' of shape \(2, 3, 4\) cannot be 'readout'",
    ),
    (
        lambda: nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2)),
        {"roles": {"0.weight": "operator"}},
        r"roles: '0.weight' cannot be 'operator': not initialized: run one batch .*; choose ignore",
    ),
    (mixed, {"roles": {"i": "vector"}}, r"roles: 'i' cannot be 'vector': dtype torch.int64 is not real .*; choose ign"),
    (mixed, {"roles": {"e": "vector"}}, r"roles: 'e' cannot be 'vector': empty; choose ignore"),
    (two, {"blocks": {"body": 4}}, r"blocks: 'body': cannot split shape \(6, 4\) into 4 .* must divide its 6 outputs"),
    (two, {"blocks": {"body": 0}}, r"blocks: 'body': the number of blocks must be an integer >= 1, got 0"),
    (two, {"blocks": {"body": 2.5}}, r"blocks: 'body': the number of blocks must be an integer >= 1, got 2\.5"),
    (two, {"blocks": {"body": True}}, r"blocks: 'body': the number of blocks must be an integer >= 1, got True"),
    (two, {"blocks": {"body": "3"}}, r"blocks: 'body': the number of blocks must be an integer >= 1, got '3'"),
    (two, {"blocks": {"body*": 2}}, r"blocks: 'body.bias' is measured as vector, which has no blocks \(shape \(6,\)\)"),
    (
        lambda: nn.Embedding(6, 4),
        {"blocks": {"weight": 2}},
        r"blocks: 'weight' is measured as embedding, which has no blocks \(shape \(6, 4\)\)",
    ),
    (
        lambda: nn.Conv1d(4, 8, 3, groups=4),
        {"blocks": {"weight": 2}},
        r"blocks: 'weight': cannot split shape \(8, 1, 3\) into 2 blocks: .* a multiple of its 4 groups",
    ),
    (nn.ReLU, {}, r"nothing to measure in ReLU: no parameters$"),
    (lambda: nn.LazyLinear(3), {}, r"nothing to measure in LazyLinear: not initialized: .* first \(2 parameters\)"),
    (two, {"roles": {"*": "ignore"}}, r"nothing to measure in ModuleDict: left out by roles \(4 parameters\)"),
    (
        two,
        {"include": ["body"], "exclude": ["*"]},
        r"nothing to measure in ModuleDict: left out by include or exclude \(4 parameters\)",
    ),
]


@pytest.mark.parametrize(("make", "chosen", "message"), REFUSED)
def test_what_does_not_fit_is_refused_by_name(make, chosen, message):
    with pytest.raises(ValueError, match=message):
        dissect(make(), **chosen)


def test_a_long_list_of_layers_is_cut():
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(30)))
    with pytest.raises(ValueError, match=r"Layers: 0, 0\.bias, .*, \.\.\. \(60 in all\)$"):
        dissect(model, include=["x"])


def test_the_role_table_lists_matrices_and_what_is_not_measured():
    text = role_table(dissect(MODELS["parametrized"][0]()))
    assert "5 matrices and 0 biases and gains are measured" in text
    assert "parts of weights that are measured (6): " in text
    assert "not measured (" not in text
    text = role_table(dissect(MODELS["parametrized"][0](), exclude=["0"]))
    assert "not measured (1):\n  0: left out by include or exclude" in text, text


def test_of_layers_that_are_alike_few_are_compared(monkeypatch):
    """So that a model of 10,000 takes seconds, not minutes."""
    compared = []
    feeds = Operator.feeds
    monkeypatch.setattr(Operator, "feeds", lambda one, other: compared.append(1) or feeds(one, other))
    layers = [nn.Linear(8, 8) for _ in range(50)] + [nn.Linear(8, 4), nn.Linear(4, 2)]
    anatomy = dissect(nn.ModuleList(layers), optimized=[{id(p) for layer in layers for p in layer.parameters()}])
    assert [layer.info.name for layer in anatomy.layers if layer.info.role == "readout"] == ["51"]
    assert 0 < len(compared) <= 9


def test_parts_that_do_not_feed_each_other_are_networks_however_they_lie():
    """Against every pair compared with every other, for a hundred sets of random shapes."""
    draw = random.Random(0)
    for _ in range(100):
        shapes = [[draw.choice([2, 3, 4]) for _ in range(3)] for _ in range(draw.randint(2, 5))]
        parts = [nn.Sequential(nn.Linear(a, b), nn.Linear(b, c)) for a, b, c in shapes]
        joined = [{k} for k in range(len(parts))]
        for a, (_, _, outputs) in enumerate(shapes):
            for b, (inputs, _, _) in enumerate(shapes):
                if a != b and inputs == outputs:
                    both = next(s for s in joined if a in s) | next(s for s in joined if b in s)
                    joined = [s for s in joined if not s & both] + [both]
        if len({shapes[min(s)][0] for s in joined}) > 1:
            joined = [set(range(len(parts)))]
        readouts = {f"{max(s)}.1" for s in joined}
        anatomy = dissect(nn.ModuleList(parts))
        assert {layer.info.name for layer in anatomy.layers if layer.info.role == "readout"} == readouts, shapes
