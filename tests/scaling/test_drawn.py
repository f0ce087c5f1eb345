"""What is drawn anew and what is set to zero, and that nothing is touched where something is refused."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from torch import nn

from spectral_monitor.scaling import FSC, MFP, MUP


class Sequences(nn.Module):
    """Tokens with padding, recurrent layers, and attention to a key and a value of its own."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(40, 32, padding_idx=3)
        self.lstm, self.gru = nn.LSTM(32, 32, 2, bidirectional=True), nn.GRU(64, 32)
        self.cell = nn.RNNCell(32, 32)
        self.attention = nn.MultiheadAttention(32, 4, add_bias_kv=True)
        self.head = nn.Linear(32, 5)


def deep(depth=4):
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise([6, *(16,) * (depth - 1), 2])))


def test_every_bias_becomes_zero_and_nothing_else():
    """Attention's ``bias_k`` and ``bias_v`` are a token more, not biases."""
    torch.manual_seed(0)
    net = Sequences()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(3.0)
    MUP.init_(net)
    left = {"attention.bias_k", "attention.bias_v"}
    for name, parameter in net.named_parameters():
        if name in left:
            assert parameter.eq(3.0).all(), name
        elif "bias" in name:
            assert parameter.count_nonzero() == 0, name
        else:
            assert parameter.ne(3.0).all(), name
            assert parameter.count_nonzero() == parameter.numel() - 32 * (name == "tokens.weight"), name


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_padding_adds_nothing(kind):
    tokens = kind(10, 16, padding_idx=-1)
    MUP.init_(nn.Sequential(tokens, nn.Linear(16, 2)))
    assert tokens.weight[9].count_nonzero() == 0
    assert tokens.weight[:9].count_nonzero() == 9 * 16


@pytest.mark.parametrize("first", ["tokens", "head"])
def test_padding_of_a_tied_matrix(first):
    net = nn.Module()
    parts = {"tokens": nn.Embedding(10, 16, padding_idx=2), "head": nn.Linear(16, 10, bias=False)}
    for name in (first, *parts):
        setattr(net, name, parts[name])
    net.head.weight = net.tokens.weight
    MUP.init_(net, roles={"head": "readout"})
    assert net.tokens.weight[2].count_nonzero() == 0
    assert net.tokens.weight.count_nonzero() == 9 * 16


REFUSED = [
    (MFP, {}, r"there is no rule for operator 1"),
    (FSC, {"scale": math.nan}, r"scale must be a finite number > 0, got nan"),
    (FSC, {"scale": math.inf}, r"scale .* got inf"),
    (FSC, {"scale": -1.0}, r"scale .* got -1.0"),
    (FSC, {"scale": 0}, r"scale .* got 0"),
    (FSC, {"depth": 0}, r"depth must be a number of matrices or blocks, >= 1, got 0"),
    (FSC, {"depth": -2}, r"depth .* got -2"),
]


@pytest.mark.parametrize(("p", "options", "message"), REFUSED)
def test_what_is_refused_leaves_everything_as_it_was(p, options, message):
    net = deep()
    before, state = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    with pytest.raises(ValueError, match=message):
        p.init_(net, **options)
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)
    if "depth" in options:
        with pytest.raises(ValueError, match=message):
            p.param_groups(net, 0.1, **options)
