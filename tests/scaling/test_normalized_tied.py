"""Updates made to size where a matrix is embedding and readout at once, or a table lies on its side."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from spectral_monitor.scaling import NormalizedUpdates

TOKENS, PLACES = 50, 12


class Tied(nn.Module):
    """The readout is the embedding; places are added to the same stream, kinds to a narrower one."""

    def __init__(self, width):
        super().__init__()
        self.places, self.tokens = nn.Embedding(PLACES, width), nn.Embedding(TOKENS, width)
        self.kinds, self.wider = nn.Embedding(3, 8), nn.Linear(8, width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, TOKENS, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=width**-0.5)

    def forward(self, x):
        h = self.tokens(x) + self.places(torch.arange(PLACES)) + self.wider(self.kinds(x % 3))
        return self.head(self.norm(h))


def one_step(net, optimizer):
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    optimizer.zero_grad()
    x = torch.randint(TOKENS, (9, PLACES), generator=torch.Generator().manual_seed(1))
    nn.functional.cross_entropy(net(x).flatten(0, 1), x.roll(1, 1).flatten()).backward()
    optimizer.step()
    return {name: (p.detach() - before[name]).double() for name, p in net.named_parameters()}


def as_readout(update):
    return torch.linalg.matrix_norm(update, ord=2).item() * (update.shape[1] / update.shape[0]) ** 0.5


def largest_row(update):
    return update.square().mean(1).sqrt().max().item()


@pytest.mark.parametrize("base", [SGD, AdamW])
@pytest.mark.parametrize("width", [32, 256])
def test_a_tied_matrix_moves_as_the_readout_and_its_stream_by_its_largest_row(base, width):
    torch.manual_seed(0)
    net = Tied(width)
    optimizer = NormalizedUpdates(base(net.parameters(), lr=0.1, weight_decay=0.0), net)
    for _ in range(2):
        updates = one_step(net, optimizer)
    assert as_readout(updates["tokens.weight"]) == pytest.approx(0.1, rel=0.01)
    rows = largest_row(updates["tokens.weight"])
    assert rows < 0.05  # or the next lines would show nothing
    assert largest_row(updates["places.weight"]) == pytest.approx(rows, rel=0.01)
    assert largest_row(updates["kinds.weight"]) == pytest.approx(0.1, rel=1e-3)  # of another width


def test_learning_rates_of_their_own_come_on_top():
    torch.manual_seed(0)
    net = Tied(64)
    groups = [{"params": [p], "lr": 0.3 if p is net.places.weight else 0.1} for p in net.parameters()]
    updates = one_step(net, NormalizedUpdates(SGD(groups), net))
    assert largest_row(updates["places.weight"]) == pytest.approx(3 * largest_row(updates["tokens.weight"]), rel=0.01)


@pytest.mark.parametrize("still", ["frozen", "rate of 0"])
def test_with_nothing_to_follow_places_move_as_any_embedding(still):
    torch.manual_seed(0)
    net = Tied(64)
    net.tokens.weight.requires_grad_(still != "frozen")
    groups = [{"params": [p], "lr": 0.0 if p is net.tokens.weight else 0.1} for p in net.parameters()]
    updates = one_step(net, NormalizedUpdates(SGD(groups), net))
    assert updates["tokens.weight"].count_nonzero() == 0
    assert largest_row(updates["places.weight"]) == pytest.approx(0.1, rel=1e-3)


def test_copies_follow_their_own():
    torch.manual_seed(0)
    net = Tied(32)
    optimizer = NormalizedUpdates(SGD(net.parameters(), lr=0.1, momentum=0.9), net)
    one_step(net, optimizer)
    others = [copy.deepcopy((net, optimizer)), pickle.loads(pickle.dumps((net, optimizer)))]
    updates = one_step(net, optimizer)
    for other in others:
        torch.testing.assert_close(one_step(*other), updates, rtol=0, atol=0)


def test_a_table_that_lies_on_its_side():
    """A linear map of one-hot tokens, declared an embedding: its columns are the tokens."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 32, bias=False), nn.Tanh(), nn.Linear(32, 4))
    optimizer = NormalizedUpdates(SGD(net.parameters(), lr=0.1), net, roles={"0": "embedding"})
    before = net[0].weight.detach().clone()
    net(torch.eye(20)[:7]).square().sum().backward()
    optimizer.step()
    assert largest_row((net[0].weight.detach() - before).T) == pytest.approx(0.1, rel=1e-4)
