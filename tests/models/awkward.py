"""Small models, each with something awkward about its weights or its calls; input (batch, 8), output (batch, 4)."""

from __future__ import annotations

import warnings

import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as nnf
from torch.nn.utils import parametrizations, parametrize, prune


class Net(nn.Module):
    """Parts by name, and a forward over them."""

    def __init__(self, forward, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._run = forward

    def forward(self, x):
        return self._run(self, x)


def old_style(apply, module, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return apply(module, **options)


class Noisy(nn.Module):
    """Draws random numbers, counts, and moves a buffer in training."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, weight):
        self.calls += 1
        if self.training:
            self.seen.add_(1)
            weight = weight + 0.01 * torch.randn_like(weight)
        return weight * 2


class AlwaysNoisy(nn.Module):
    """Draws in evaluation too."""

    def forward(self, weight):
        return nnf.dropout(weight, 0.1, training=True)


class LowRank(nn.Module):
    def __init__(self, m, n):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.zeros(m, 2)), nn.Parameter(torch.randn(2, n))

    def forward(self, weight):
        return weight + self.up @ self.down


def three(middle, last=None):
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), middle, nn.Tanh(), last or nn.Linear(10, 4))


def parametrized(parametrization):
    middle = nn.Linear(12, 10)
    parametrize.register_parametrization(middle, "weight", parametrization)
    return three(middle)


def convolutions():
    return nn.Sequential(
        nn.Unflatten(1, (2, 4)),
        parametrizations.weight_norm(nn.Conv1d(2, 6, 3, groups=2)),
        nn.ReLU(inplace=True),
        old_style(nn.utils.spectral_norm, nn.Conv1d(6, 4, 2)),
        nn.Flatten(),
        parametrizations.spectral_norm(nn.Linear(4, 4)),
    )


def pruned():
    middle = nn.Linear(12, 10)
    prune.l1_unstructured(middle, "weight", 0.5)
    return three(middle)


def frozen_parts():
    model = parametrizations.weight_norm(nn.Linear(12, 10))
    model.parametrizations.weight.original0.requires_grad_(False)
    model = three(model)
    model[0].requires_grad_(False)
    return model


def all_frozen():
    return three(parametrizations.weight_norm(nn.Linear(12, 10)).requires_grad_(False))


def tied_computed():
    shared = LowRank(8, 8)
    a, b = nn.Linear(8, 8), nn.Linear(8, 8)
    b.weight = a.weight
    parametrize.register_parametrization(a, "weight", shared)
    return Net(lambda m, x: m.c(torch.tanh(m.b(torch.tanh(m.a(x))))), a=a, b=b, c=nn.Linear(8, 4))


def tied():
    model = Net(
        lambda m, x: m.head(torch.tanh(m.inner(m.table((x > 0).long()).mean(1)))),
        table=nn.Embedding(4, 6),
        inner=nn.Linear(6, 6),
        head=nn.Linear(6, 4, bias=False),
    )
    model.head.weight = model.table.weight
    return model


def called_often():
    return Net(
        lambda m, x: m.head(m.cell(nnf.relu(m.cell(nnf.relu(m.cell(x)))))), cell=nn.Linear(8, 8), head=nn.Linear(8, 4)
    )


def unused_expert():
    def route(m, x):
        return m.head(torch.tanh(m.experts[0](x)) + torch.tanh(m.experts[2](x)))

    return Net(route, experts=nn.ModuleList(nn.Linear(8, 6) for _ in range(3)), head=nn.Linear(6, 4))


class Wrapping(nn.Linear):
    """Returns its output inside something."""

    def __init__(self, inside, *sizes):
        super().__init__(*sizes)
        self.inside = inside

    def forward(self, x):
        return self.inside(super().forward(x))


def tuples_and_dicts():
    return Net(
        lambda m, x: m.head(torch.tanh(m.b(torch.tanh(m.a(x)[0]))["h"])),
        a=Wrapping(lambda h: (h, 3), 8, 6),
        b=Wrapping(lambda h: {"h": h, "n": None}, 6, 6),
        head=nn.Linear(6, 4),
    )


def in_place():
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(inplace=True), nn.Linear(12, 4))


def recurrent(cell, **options):
    def run(m, x):
        return m.head(m.rnn(x.unflatten(1, (2, 4)))[0][:, -1])

    return lambda: Net(run, rnn=cell(4, 5, batch_first=True, **options), head=nn.Linear(5, 4))


def cells():
    def run(m, x):
        h = m.rnn(x, m.gru(x))
        return m.head(m.lstm(x, (h, h))[0])

    return Net(run, gru=nn.GRUCell(8, 5), rnn=nn.RNNCell(8, 5), lstm=nn.LSTMCell(8, 5), head=nn.Linear(5, 4))


def parametrized_recurrence():
    model = recurrent(nn.GRU)()
    parametrizations.weight_norm(model.rnn, "weight_hh_l0")
    return model


def attention():
    def run(m, x):
        h = x.unflatten(1, (2, 4))
        return m.head(m.attention(h, h, h)[0].mean(1))

    return Net(run, attention=nn.MultiheadAttention(4, 2, batch_first=True), head=nn.Linear(4, 4))


def functional_use():
    return Net(lambda m, x: m.head(torch.tanh(nnf.linear(x, m.a.weight))), a=nn.Linear(8, 6), head=nn.Linear(6, 4))


def lora():
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 8, "n_positions": 8}
    model = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    adapted = get_peft_model(
        model, LoraConfig(r=2, target_modules=["c_attn", "c_proj"], lora_dropout=0.1, fan_in_fan_out=True)
    )
    return Net(lambda m, x: m.lm(x.argsort(1)).logits[:, -1, :4], lm=adapted)


MODELS = {
    "weight_norm": lambda: three(parametrizations.weight_norm(nn.Linear(12, 10))),
    "weight_norm of all": lambda: three(parametrizations.weight_norm(nn.Linear(12, 10), dim=None)),
    "weight_norm, old": lambda: three(old_style(nn.utils.weight_norm, nn.Linear(12, 10))),
    "spectral_norm": lambda: three(parametrizations.spectral_norm(nn.Linear(12, 10))),
    "spectral_norm, old": lambda: three(old_style(nn.utils.spectral_norm, nn.Linear(12, 10))),
    "spectral_norm of the readout": lambda: three(nn.Linear(12, 10), parametrizations.spectral_norm(nn.Linear(10, 4))),
    "orthogonal": lambda: three(parametrizations.orthogonal(nn.Linear(12, 10))),
    "orthogonal, Householder": lambda: three(
        parametrizations.orthogonal(nn.Linear(12, 10), orthogonal_map="householder")
    ),
    "noisy": lambda: parametrized(Noisy()),
    "always noisy": lambda: parametrized(AlwaysNoisy()),
    "low rank": lambda: parametrized(LowRank(10, 12)),
    "convolutions": convolutions,
    "pruned": pruned,
    "frozen parts": frozen_parts,
    "all frozen": all_frozen,
    "tied, computed": tied_computed,
    "tied": tied,
    "called often": called_often,
    "unused expert": unused_expert,
    "tuples and dicts": tuples_and_dicts,
    "in place": in_place,
    "LSTM": recurrent(nn.LSTM, num_layers=2),
    "GRU": recurrent(nn.GRU),
    "RNN": recurrent(nn.RNN),
    "GRU, weight_norm": parametrized_recurrence,
    "cells": cells,
    "attention": attention,
    "functional use": functional_use,
    "LoRA": lora,
}
COMPUTED = [
    "weight_norm",
    "weight_norm of all",
    "weight_norm, old",
    "spectral_norm",
    "spectral_norm, old",
    "orthogonal",
    "orthogonal, Householder",
    "noisy",
    "low rank",
    "pruned",
    "frozen parts",
]
