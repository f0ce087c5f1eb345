"""How many matrices a way through a network has, counted by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from spectral_monitor.capture.replay.loss_graph import matrices_in_a_row

WIDTH = 8
X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


def chain(count, norm=nn.Identity, make=lambda: nn.Linear(WIDTH, WIDTH)):
    layers = []
    for _ in range(count - 1):
        layers += [make(), norm(WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, make())


class Around(nn.Module):
    """Adds what a module makes of its inputs to them."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


class Bottleneck(nn.Module):
    """Narrower and narrower, then wider again; a connection joins the two ends, as in a U-Net."""

    def __init__(self):
        super().__init__()
        self.enter, self.inner, self.leave = nn.Linear(WIDTH, WIDTH), chain(6), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        h = self.enter(x)
        return self.leave(torch.cat([h, self.inner(h)], 1))


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("norm", [nn.Identity, nn.LayerNorm, nn.BatchNorm1d])
def test_of_a_chain_all_count_but_those_before_a_batch_norm(count, norm):
    assert matrices_in_a_row(chain(count, norm)(X)) == (1 if norm is nn.BatchNorm1d else count)


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (nn.Sequential(chain(1), *(Around(chain(2)) for _ in range(5)), chain(1)), 2),
        (nn.Sequential(Around(chain(2)), chain(3)), 5),  # inputs are no matrix, so nothing leads around the block
        (Bottleneck(), 2),
        (chain(4, make=lambda: weight_norm(nn.Linear(WIDTH, WIDTH))), 4),
        (nn.Sequential(*[nn.Linear(WIDTH, WIDTH)] * 9, nn.Linear(WIDTH, 2)), 2),  # one is used nine times
        (nn.Sequential(nn.Unflatten(1, (1, WIDTH)), nn.Conv1d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2)), 2),
    ],
    ids=["residual", "short residual", "u-net", "weight norm", "shared", "convolution"],
)
def test_ways_around_and_matrices_of_other_kinds(model, count):
    for output in (model(X), model(X.clone().requires_grad_()), model(X).square().mean()):
        assert matrices_in_a_row(output) == count


def test_the_same_in_half_precision_and_for_sequences():
    with torch.autocast("cpu", torch.bfloat16):
        assert matrices_in_a_row(chain(5)(X)) == 5
    assert matrices_in_a_row(chain(5)(X.reshape(2, 2, WIDTH))) == 5


def test_an_embedding_ends_a_way():
    assert matrices_in_a_row(chain(3)(nn.Embedding(5, WIDTH)(torch.tensor([0, 1])))) == 3


def test_where_no_matrix_is_seen_there_is_none():
    assert matrices_in_a_row(torch.ones(3, requires_grad=True).sum()) == 0
    assert matrices_in_a_row(torch.tensor(1.0)) == 0
