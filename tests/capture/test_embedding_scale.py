"""Constants that embeddings are multiplied with, read off a graph."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from spectral_monitor.capture.replay.loss_graph import embedding_scales

IDS = torch.tensor([[1, 2, 3], [4, 5, 0]])
ROOT = math.sqrt(16)


def table(rows=10):
    torch.manual_seed(0)
    return nn.Embedding(rows, 16)


def behind(x):
    """Some network."""
    return nn.Linear(16, 4)(F.layer_norm(x, (16,)).relu()).square().mean()


CASES = {
    "root of the width": (lambda t: t(IDS) * ROOT, 4.0),
    "from the left": (lambda t: ROOT * t(IDS), 4.0),
    "a tensor": (lambda t: t(IDS) * torch.tensor(16.0).sqrt(), 4.0),
    "a tensor from the left": (lambda t: torch.tensor(4.0) * t(IDS), 4.0),
    "divided": (lambda t: t(IDS) / 0.25, 4.0),
    "negative": (lambda t: -4 * t(IDS), 4.0),
    "with positions": (lambda t: t(IDS) * ROOT + torch.ones(3, 16), 4.0),
    "another order of entries": (lambda t: t(IDS).transpose(0, 1) * ROOT, 4.0),
    "in half precision": (lambda t: t(IDS).bfloat16().float() * ROOT, 4.0),
    "none": (lambda t: t(IDS), 1.0),
    "a gate": (lambda t: t(IDS) * torch.ones(16), 1.0),
    "its own gate": (lambda t: t(IDS) * t(IDS).sigmoid(), 1.0),
    "a trained number": (lambda t: t(IDS) * nn.Parameter(torch.tensor(4.0)), 1.0),
    "zero": (lambda t: t(IDS) * 0.0, 1.0),
    "after positions": (lambda t: (t(IDS) + torch.ones(16)) * ROOT, 1.0),
    "used in two ways": (lambda t: t(IDS) * ROOT + t(IDS + 1), 1.0),
    "used twice alike": (lambda t: t(IDS) * ROOT + t(IDS + 1) * ROOT, 4.0),
}


@pytest.mark.parametrize(("enter", "scale"), CASES.values(), ids=CASES)
def test_the_constant_is_found(enter, scale):
    found = embedding_scales(behind(enter(table())))
    assert found == {10: pytest.approx(scale)}


def test_embeddings_are_told_apart_by_their_rows():
    tokens, places = table(), table(3)
    x = tokens(IDS) * ROOT + places(torch.arange(3))
    assert embedding_scales(behind(x)) == {10: 4.0, 3: 1.0}


def test_what_a_model_returns_will_do_and_networks_without_embeddings_have_none():
    assert embedding_scales(nn.Linear(16, 4)(table()(IDS) * ROOT)) == {10: 4.0}
    assert embedding_scales(behind(torch.randn(3, 16))) == {}
    assert embedding_scales(torch.tensor(1.0)) == {}


def test_after_the_backward_pass_it_is_too_late():
    loss = behind(table()(IDS) * ROOT)
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        embedding_scales(loss)
