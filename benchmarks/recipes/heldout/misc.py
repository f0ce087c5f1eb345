"""Graphs, recommendations, tables, generators and control."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    elu,
    leaky_relu,
    mse_loss,
    silu,
    smooth_l1_loss,
)
from torch.optim import Adam, SparseAdam

from benchmarks.recipes.heldout.data import Supervised, seeded, still, unexplained, wide
from benchmarks.recipes.recipe import Recipe
from benchmarks.recipes.run import Run, cosine


@cache
def molecules(count: int = 3000, nodes: int = 14) -> tuple[Tensor, Tensor]:
    """Random graphs, packed with noisy node features; the class is their kind: even, in two parts, ring, hubs."""
    generator = seeded(11)
    y = torch.randint(4, (count,), generator=generator)
    position = torch.arange(nodes)
    parts = (position[:, None] // 7 == position // 7).float()
    distance = (position[:, None] - position).abs()
    ring = (torch.minimum(distance, nodes - distance) <= 2).float()
    hubs = ((position[:, None] < 2) | (position < 2)).float()
    chance = torch.stack((torch.full((nodes, nodes), 0.3), 0.08 + 0.45 * parts, 0.1 + 0.62 * ring, 0.15 + 0.55 * hubs))
    upper = (torch.rand(count, nodes, nodes, generator=generator) < chance[y]).float().triu(1)
    edges = upper + upper.transpose(1, 2)
    order = torch.rand(count, nodes, generator=generator).argsort(1)
    edges = edges.gather(1, order[..., None].expand_as(edges)).gather(2, order[:, None].expand_as(edges))
    degree = edges.sum(2, keepdim=True)
    features = torch.cat((degree / 4 - 1, torch.randn(count, nodes, 7, generator=generator)), 2)
    return torch.cat((edges, features), 2), y


class Isomorphism(nn.Module):
    """GIN: sums over neighbours, a perceptron with batch norm, sums over nodes."""

    def __init__(self, d: int, depth: int = 3, nodes: int = 14) -> None:
        super().__init__()
        self.nodes = nodes
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(d if i else 8, d), nn.BatchNorm1d(d), nn.ReLU(), nn.Linear(d, d))
            for i in range(depth)
        )
        self.eps = nn.Parameter(torch.zeros(depth))
        self.readouts = nn.Linear(depth * d, d)
        self.dropout = nn.Dropout(0.3)
        self.classifier = nn.Linear(d, 4)

    def forward(self, packed: Tensor) -> Tensor:
        edges, h = packed[..., : self.nodes], packed[..., self.nodes :]
        pooled = []
        for i, layer in enumerate(self.layers):
            h = layer((edges @ h + (1 + self.eps[i]) * h).flatten(0, 1)).relu().unflatten(0, (-1, self.nodes))
            pooled.append(h.mean(1))
        return self.classifier(self.dropout(self.readouts(torch.cat(pooled, 1)).relu()))


def isomorphism(seed: int, width: float) -> Run:
    torch.manual_seed(seed)
    model, steps = Isomorphism(wide(48, width)), 250
    task = Supervised(model, molecules(), 64, seed)
    optimizer = Adam(model.parameters(), lr=4e-3)
    return Run(model, [optimizer], task, task.evaluate, steps, lambda t: 0.5 ** (t // 80))


@cache
def citations(nodes: int = 240, words: int = 320, classes: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Adjacency, row-normalized bags of words and classes of papers that cite their like."""
    generator = seeded(13)
    y = torch.randint(classes, (nodes,), generator=generator)
    chance = torch.where(y[:, None] == y, 0.036, 0.005)
    upper = (torch.rand(nodes, nodes, generator=generator) < chance).float().triu(1)
    topics = 0.015 + 0.03 * (torch.rand(classes, words, generator=generator) < 0.15)
    bags = (torch.rand(nodes, words, generator=generator) < topics[y]).float()
    return upper + upper.T + torch.eye(nodes), bags / bags.sum(1, keepdim=True).clamp(min=1), y


class GraphAttention(nn.Module):
    def __init__(self, into: int, out: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.lin = nn.Linear(into, heads * out, bias=False)
        self.att_src, self.att_dst = (nn.Parameter(torch.empty(heads, out)) for _ in range(2))
        self.dropout = nn.Dropout(0.4)
        for p in (self.lin.weight, self.att_src, self.att_dst):
            nn.init.xavier_uniform_(p)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h = self.lin(self.dropout(x)).unflatten(1, (self.heads, -1)).transpose(0, 1)
        a, b = (h * self.att_dst[:, None]).sum(-1), (h * self.att_src[:, None]).sum(-1)
        scores = leaky_relu(a[:, :, None] + b[:, None], 0.2).masked_fill(edges == 0, -torch.inf)
        return (self.dropout(scores.softmax(-1)) @ h).transpose(0, 1).flatten(1)


class GAT(nn.Module):
    def __init__(self, width: float) -> None:
        super().__init__()
        d = wide(8, width)
        self.conv1, self.conv2 = GraphAttention(320, d, 8), GraphAttention(8 * d, 5, 1)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.conv2(elu(self.conv1(x, edges)), edges)


def graph_attention(seed: int, width: float) -> Run:
    torch.manual_seed(seed)
    (edges, x, y), model, steps = citations(), GAT(width), 150
    shown = torch.arange(len(y)) < 120

    def loss() -> Tensor:
        return cross_entropy(model(x, edges)[shown], y[shown])

    def evaluate() -> float:
        with still(model):
            return cross_entropy(model(x, edges)[~shown], y[~shown]).item()

    optimizer = Adam(model.parameters(), lr=5e-3, weight_decay=5e-4)
    return Run(model, [optimizer], loss, evaluate, steps)


@cache
def clicks(count: int = 30000, users: int = 400, items: int = 300) -> tuple[Tensor, Tensor]:
    """Pairs of users and items, and whether they liked them, from hidden tastes of 4 traits and popularity."""
    generator = seeded(17)
    tastes, traits = torch.randn(users, 4, generator=generator), torch.randn(items, 4, generator=generator)
    popular = torch.rand(items, generator=generator) ** 2 + 0.05
    user = torch.randint(users, (count,), generator=generator)
    item = torch.multinomial(popular, count, replacement=True, generator=generator)
    odds = 2 * (tastes[user] * traits[item]).sum(1) + popular[item]
    liked = torch.rand(count, generator=generator) < odds.sigmoid()
    return torch.stack((user, item), 1), liked.float()


class TwoTower(nn.Module):
    """Embedded users and items, a perceptron for each, and their product."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.user_embedding, self.item_embedding = nn.Embedding(400, d, sparse=True), nn.Embedding(300, d, sparse=True)
        self.user_tower, self.item_tower = (
            nn.Sequential(nn.Linear(d, 2 * d), nn.ReLU(), nn.Linear(2 * d, d)) for _ in range(2)
        )
        self.bias = nn.Parameter(torch.zeros(()))
        for table in (self.user_embedding, self.item_embedding):
            nn.init.normal_(table.weight, std=0.3)

    def forward(self, pairs: Tensor) -> Tensor:
        user = self.user_tower(self.user_embedding(pairs[:, 0]))
        item = self.item_tower(self.item_embedding(pairs[:, 1]))
        return (user * item).sum(1) + self.bias


def two_tower(seed: int, width: float) -> Run:
    torch.manual_seed(seed)
    model, steps = TwoTower(wide(32, width)), 300
    bce = binary_cross_entropy_with_logits
    task = Supervised(model, clicks(), 512, seed, bce, bce, held_out=4000)
    tables = [model.user_embedding.weight, model.item_embedding.weight]
    dense = [p for name, p in model.named_parameters() if "embedding" not in name]
    optimizers = [SparseAdam(tables, lr=1.6e-2), Adam(dense, lr=4e-3)]
    return Run(model, optimizers, task, task.evaluate, steps)


@cache
def table(count: int = 6000) -> tuple[Tensor, Tensor]:
    """Ten standardized columns and a standardized, partly interacting response (Friedman's first, with noise)."""
    generator = seeded(19)
    x = torch.rand(count, 10, generator=generator)
    y = 10 * torch.sin(torch.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    y = y + torch.randn(count, generator=generator)
    return (x - x.mean(0)) / x.std(0), ((y - y.mean()) / y.std())[:, None]


class Tabular(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(10, d), nn.Linear(d, d), nn.Linear(d, d)
        self.out = nn.Linear(d, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(silu(self.fc3(silu(self.fc2(silu(self.fc1(x)))))))


def regression(seed: int, width: float) -> Run:
    torch.manual_seed(seed)
    model, steps = Tabular(wide(104, width)), 300
    task = Supervised(model, table(), 128, seed, mse_loss, unexplained)
    optimizer = Adam(model.parameters(), lr=1.6e-2)
    return Run(model, [optimizer], task, task.evaluate, steps, cosine(steps))


class QNetwork(nn.Module):
    """Values of actions, and those of a copy that follows in jumps."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.target = self.network(d).requires_grad_(False)
        self.online = self.network(d)
        self.follow()

    @staticmethod
    def network(d: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(8, d), nn.ReLU(), nn.Linear(d, d), nn.ReLU(), nn.Linear(d, 4))

    def follow(self) -> None:
        self.target.load_state_dict(self.online.state_dict())

    def forward(self, state: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
        return self.online(state), self.target(following)


class GridWorld:
    """Walks on a 9 by 9 grid towards two prizes; slips at random. Exact values are known."""

    side, discount = 9, 0.8

    def __init__(self) -> None:
        n = self.side
        cell = torch.arange(n * n)
        row, column = cell // n, cell % n
        moves = ((-1, 0), (1, 0), (0, -1), (0, 1))
        self.next = torch.stack([(row + a).clamp(0, n - 1) * n + (column + b).clamp(0, n - 1) for a, b in moves], 1)
        self.reward = torch.zeros(n * n)
        self.reward[[n + 1, n * n - n - 2]] = torch.tensor([1.0, 2.0])
        u = torch.stack((row, column), 1) / (n - 1) * torch.pi
        self.features = torch.cat((u.cos(), (2 * u).cos(), u.sin(), (3 * u).cos()), 1) * 2**0.5
        values = torch.zeros(n * n, 4)
        for _ in range(200):
            values = self.mean_target(values.max(1).values)
        self.values = values

    def mean_target(self, value: Tensor) -> Tensor:
        ahead = (self.reward + self.discount * value)[self.next]
        return 0.9 * ahead + 0.1 * ahead.mean(1, keepdim=True)


def q_learning(seed: int, width: float) -> Run:
    torch.manual_seed(seed)
    world, model, steps = GridWorld(), QNetwork(wide(96, width)), 300
    generator, taken = seeded(seed), [0]

    def loss() -> Tensor:
        cell, action, slip = (torch.randint(high, (128,), generator=generator) for high in (len(world.reward), 4, 4))
        moved = torch.where(torch.rand(128, generator=generator) < 0.1, slip, action)
        following = world.next[cell, moved]
        now, then = model(world.features[cell], world.features[following])
        goal = world.reward[following] + world.discount * then.max(1).values
        return smooth_l1_loss(now.gather(1, action[:, None])[:, 0], goal)

    def follow() -> None:
        taken[0] += 1
        if taken[0] % 10 == 0:
            model.follow()

    def evaluate() -> float:
        """Squared distance from the exact values as a share of their variance."""
        with still(model):
            return unexplained(model(world.features, world.features)[0], world.values).item()

    optimizer = Adam(model.online.parameters(), lr=4e-3, eps=1.5e-4)
    roles = {"online.4": "readout", "target*": "ignore"}
    return Run(model, [optimizer], loss, evaluate, steps, after_step=follow, roles=roles)


RECIPES = (
    Recipe("graph isomorphism net, Adam", isomorphism, "held out", "GIN: Adam, batch norm, rate halved"),
    Recipe("graph attention, Adam", graph_attention, "held out", "GAT on Cora: Adam 5e-3, 5e-4, 8 heads of 8, ELU"),
    Recipe("two towers, SparseAdam", two_tower, "held out", "recommenders: SparseAdam for tables, Adam for towers"),
    Recipe("tabular regression, Adam", regression, "held out", "tabular perceptron: Adam, cosine"),
    Recipe(
        "deep Q-learning, Adam", q_learning, "held out", "Rainbow's Adam eps 1.5e-4; target network copied in jumps"
    ),
)
