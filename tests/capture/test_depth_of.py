"""How deep a network is, counted by hand: matrices on the way with the fewest, and branches that join it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from spectral_monitor.capture.replay.loss_graph import Depth, depth_of

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
    assert depth_of(chain(count, norm)(X)).matrices == (1 if norm is nn.BatchNorm1d else count)


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
        assert depth_of(output).matrices == count


def test_the_same_in_half_precision_and_for_sequences():
    with torch.autocast("cpu", torch.bfloat16):
        assert depth_of(chain(5)(X)).matrices == 5
    assert depth_of(chain(5)(X.reshape(2, 2, WIDTH))).matrices == 5


def test_an_embedding_ends_a_way():
    assert depth_of(chain(3)(nn.Embedding(5, WIDTH)(torch.tensor([0, 1])))).matrices == 3


def test_where_no_matrix_is_seen_there_is_none():
    assert depth_of(torch.ones(3, requires_grad=True).sum()).matrices == 0
    assert depth_of(torch.tensor(1.0)).matrices == 0


class Block(nn.Module):
    """A block of a transformer: attention and a perceptron, with norms in front of them or after them."""

    def __init__(self, after=False):
        super().__init__()
        self.after = after
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.proj, self.inner = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), chain(2)

    def attend(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.proj(nn.functional.scaled_dot_product_attention(q, k, v))

    def forward(self, x):
        for norm, branch in zip(self.norms, (self.attend, self.inner), strict=True):
            x = norm(x + branch(x)) if self.after else x + branch(norm(x))
        return x


class Transformer(nn.Module):
    """A token and a position embedding, blocks, a norm and a readout."""

    def __init__(self, depth, after=False):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(5, WIDTH), nn.Embedding(4, WIDTH)
        self.blocks = nn.Sequential(*(Block(after) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = self.tokens(x) + self.positions(torch.arange(4))
        return self.head(self.norm(self.blocks(x)))


@pytest.mark.parametrize("depth", [1, 6])
@pytest.mark.parametrize("after", [False, True])
def test_each_block_of_a_transformer_has_two_branches_and_positions_are_added_too(depth, after):
    depth_of_model = depth_of(Transformer(depth, after)(torch.zeros(2, 4, dtype=torch.long)))
    assert depth_of_model == Depth(1, 2 * depth + 1, 2 * depth if after else 0)


class ByHand(nn.Module):
    """A norm with a root mean square, written out."""

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Standardized(nn.Module):
    """A layer norm, written out."""

    def forward(self, x):
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-6).sqrt()


@pytest.mark.parametrize(
    "norm",
    [
        ByHand,
        Standardized,
        lambda: nn.RMSNorm(WIDTH),
        lambda: nn.LayerNorm(WIDTH),
        lambda: nn.GroupNorm(1, WIDTH),
        lambda: nn.BatchNorm1d(WIDTH),
    ],
)
def test_sums_that_only_a_norm_reads_are_post_norm(norm):
    class After(nn.Module):
        def __init__(self):
            super().__init__()
            self.branch, self.norm = chain(2), norm()

        def forward(self, x):
            return self.norm(x + self.branch(x))

    assert depth_of(nn.Sequential(chain(1), *(After() for _ in range(3)), chain(1))(X)) == Depth(2, 3, 3)


def normed(width):
    return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU())


class Parallel(nn.Module):
    """Several branches whose outputs stand side by side."""

    def __init__(self, *branches):
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x):
        return torch.cat([branch(x) for branch in self.branches], 1)


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (chain(5), 0),
        (chain(5, nn.LayerNorm), 0),
        (chain(5, nn.BatchNorm1d), 4),
        (chain(5, lambda width: nn.GroupNorm(2, width)), 4),
        (
            nn.Sequential(*(Around(nn.Sequential(*chain(2, nn.BatchNorm1d), nn.BatchNorm1d(WIDTH))) for _ in range(3))),
            6,
        ),
        (nn.Sequential(normed(WIDTH), Parallel(normed(WIDTH), nn.Sequential(*(normed(WIDTH) for _ in range(3))))), 4),
        (nn.Sequential(*[normed(WIDTH)] * 7, nn.Linear(WIDTH, 2)), 2),  # the same weights seven times
        (nn.Sequential(nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2)), 0),
    ],
    ids=["none", "layer norm", "batch norm", "group norm", "residual", "side by side", "shared", "in front"],
)
def test_matrices_in_front_of_a_norm_of_channels_count_on_the_longest_path(model, count):
    assert depth_of(model(X)).normed == depth_of(model(X).square().mean()).normed == count


def test_a_norm_between_stages_does_not_make_a_network_post_norm():
    stages = [nn.Sequential(*(Around(chain(2)) for _ in range(3)), nn.LayerNorm(WIDTH)) for _ in range(3)]
    assert depth_of(nn.Sequential(chain(1), *stages, chain(1))(X)) == Depth(2, 9, 0)


class Biased(nn.Module):
    """Adds what the network does not make: a parameter and the inputs."""

    def __init__(self):
        super().__init__()
        self.linear, self.bias = nn.Linear(WIDTH, WIDTH, bias=False), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return self.linear(x) + self.bias + x


class Normed(nn.Module):
    """A block of a residual network: the branch ends in a batch norm."""

    def __init__(self):
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))

    def forward(self, x):
        return (x + self.branch(x)).relu()


def test_sums_of_two_things_that_matrices_make_are_branches():
    """Those that end in a batch norm are not, for it takes out how large they are."""

    def around(block):
        return nn.Sequential(chain(1), *(block() for _ in range(5)), chain(1))

    assert depth_of(around(lambda: Around(chain(2)))(X)).branches == 5
    assert depth_of(around(Normed)(X)).branches == 0
    assert depth_of(Biased()(X)).branches == 0


def test_sums_of_all_steps_of_a_gru_count_once():
    """Each step adds to the state what the same matrices make: there are no more branches than matrices."""
    gru, head = nn.GRU(WIDTH, WIDTH, num_layers=2, batch_first=True), nn.Linear(WIDTH, 3)
    assert 0 < depth_of(head(gru(torch.randn(2, 20, WIDTH))[0])).branches <= 5
