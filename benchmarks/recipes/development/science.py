"""Development recipes on generated data: a graph, sounds, clicks and a point mass to control."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, max_pool1d, relu
from torch.optim import Adagrad, Adam

from benchmarks.recipes.development.common import Split, classification, fixed, private, wide
from benchmarks.recipes.run import Run

NODES, CLASSES, FEATURES = 1000, 6, 200


@cache
def citations() -> tuple[Tensor, Tensor, Tensor]:
    """Generate a graph like Cora's: normalized adjacency, words of every node, classes."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(CLASSES, (NODES,), generator=generator)
    chance = torch.where(y[:, None] == y, 0.015, 0.002)
    links = (torch.rand(NODES, NODES, generator=generator) < chance).triu(1).float()
    adjacency = links + links.T + torch.eye(NODES)
    root = adjacency.sum(1).rsqrt()
    habits = 0.02 + 0.05 * torch.rand(CLASSES, FEATURES, generator=generator) ** 3
    words = (torch.rand(NODES, FEATURES, generator=generator) < habits[y]).float()
    return root[:, None] * adjacency * root, words / words.sum(1, keepdim=True).clamp(min=1), y


class GCN(nn.Module):
    """Two graph convolutions (Kipf and Welling, 2017)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Linear(FEATURES, width)
        self.conv2 = nn.Linear(width, CLASSES)
        self.drop = nn.Dropout(0.5)
        for layer in (self.conv1, self.conv2):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, adjacency: Tensor, x: Tensor) -> Tensor:
        h = relu(adjacency @ self.conv1(self.drop(x)))
        return adjacency @ self.conv2(self.drop(h))


def gcn(seed: int, width: float = 1.0) -> Run:
    torch.manual_seed(seed)
    adjacency, x, y = citations()
    model = GCN(wide(64, width))
    optimizer = Adam(
        [
            {"params": list(model.conv1.parameters()), "weight_decay": 5e-4},
            {"params": list(model.conv2.parameters()), "weight_decay": 0.0},
        ],
        lr=1e-2,
    )
    training = torch.arange(NODES) < 300

    return Run(
        model,
        [optimizer],
        lambda: cross_entropy(model(adjacency, x)[training], y[training]),
        fixed(model, lambda: cross_entropy(model(adjacency, x)[~training], y[~training])),
        200,
    )


@cache
def sounds() -> Split:
    """Generate tones, chirps, trills and beats of a quarter second in noise; pitch, phase and onset vary."""
    generator = torch.Generator().manual_seed(0)
    count, length = 2560, 1000

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, 1, generator=generator)

    y = torch.randint(10, (count,), generator=generator)
    t = torch.arange(length)[None] / 4000
    pitch = uniform(150, 600)
    phase, onset = uniform(0, 2 * math.pi), uniform(0, 0.1)
    base = 2 * math.pi * pitch * t + phase
    kinds = torch.stack(
        [
            base.sin(),
            base.sin().sign() * 0.7,
            base.sin() + (2 * base).sin() * 0.7,
            base.sin() + (3 * base).sin() * 0.7,
            (base * (1 + t)).sin(),
            (base * (1.5 - t)).sin(),
            (base + 4 * (2 * math.pi * 12 * t).sin()).sin(),
            base.sin() * (2 * math.pi * 16 * t).sin(),
            base.sin() + (base * 1.06).sin(),
            (base * (1 + 0.3 * ((8 * t * 2).floor() % 2))).sin(),
        ],
        1,
    )
    x = kinds[torch.arange(count), y] * (t > onset) * uniform(0.3, 1)
    x = x + 0.3 * torch.randn(count, length, generator=generator)
    x = (x / x.std())[:, None]
    return Split(x[512:], y[512:], x[:512], y[:512])


class M5(nn.Module):
    """A long first filter, then short ones with batch norm and pooling (Dai et al., 2017)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(1, width, 40, stride=4)
        self.bn1 = nn.BatchNorm1d(width)
        self.conv2 = nn.Conv1d(width, width, 3)
        self.bn2 = nn.BatchNorm1d(width)
        self.conv3 = nn.Conv1d(width, 2 * width, 3)
        self.bn3 = nn.BatchNorm1d(2 * width)
        self.fc = nn.Linear(2 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in ((self.conv1, self.bn1), (self.conv2, self.bn2), (self.conv3, self.bn3)):
            x = max_pool1d(norm(conv(x)).relu(), 4 if conv is self.conv1 else 2)
        return self.fc(x.mean(2))


def audio(seed: int, width: float = 1.0) -> Run:
    torch.manual_seed(seed)
    model = M5(wide(32, width))
    optimizer = Adam(model.parameters(), lr=1e-2, weight_decay=1e-4)
    return classification(model, optimizer, sounds(), seed, 200, schedule=lambda step: 1.0 if step < 150 else 0.1)


FIELDS = (400, 200, 100, 50, 20, 10)


@cache
def clicks() -> tuple[Split, Tensor, Tensor]:
    """Generate clicks that depend on pairs of categories, which are drawn by Zipf's law, and on dense features."""
    generator = torch.Generator().manual_seed(0)
    count = 40000
    ids = torch.stack(
        [
            torch.multinomial(1 / torch.arange(1.0, size + 1), count, replacement=True, generator=generator)
            for size in FIELDS
        ],
        1,
    )
    dense = torch.randn(count, 8, generator=generator)
    tastes = [torch.randn(size, 4, generator=generator) for size in FIELDS]
    v = torch.stack([taste[column] for taste, column in zip(tastes, ids.T, strict=True)], 1)
    pairs = 0.5 * (v.sum(1).square() - v.square().sum(1)).sum(1)
    score = pairs / pairs.std() + dense @ torch.randn(8, generator=generator) / 4 + 0.5 * dense[:, 0] * v[:, 0, 0]
    y = (torch.rand(count, generator=generator) < torch.sigmoid(4 * score - 1)).float()
    return Split(dense[4000:], y[4000:], dense[:4000], y[:4000]), ids[4000:], ids[:4000]


class DLRM(nn.Module):
    """Embeddings, a bottom perceptron, their inner products, a top perceptron (Naumov et al., 2019)."""

    def __init__(self, width: int, size: int = 16) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(field, size) for field in FIELDS)
        self.bottom = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, size), nn.ReLU())
        terms = len(FIELDS) + 1
        self.rows, self.columns = torch.tril_indices(terms, terms, -1)
        self.top = nn.Sequential(
            nn.Linear(size + len(self.rows), width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )
        for embedding in self.embeddings:
            nn.init.uniform_(embedding.weight, -(embedding.num_embeddings**-0.5), embedding.num_embeddings**-0.5)
        for module in (*self.bottom, *self.top):
            if isinstance(module, nn.Linear):
                nn.init.xavier_normal_(module.weight)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        h = self.bottom(dense)
        terms = torch.stack([h, *(table(ids[:, i]) for i, table in enumerate(self.embeddings))], 1)
        products = (terms @ terms.transpose(1, 2))[:, self.rows, self.columns]
        return self.top(torch.cat((h, products), 1)).squeeze(1)


def recommender(seed: int, width: float = 1.0) -> Run:
    torch.manual_seed(seed)
    data, ids, test_ids = clicks()
    model = DLRM(wide(64, width))
    source = private(seed)

    def loss() -> Tensor:
        rows = torch.randint(len(data.x), (256,), generator=source)
        return binary_cross_entropy_with_logits(model(data.x[rows], ids[rows]), data.y[rows])

    return Run(
        model,
        [Adagrad(model.parameters(), lr=0.04)],
        loss,
        fixed(model, lambda: binary_cross_entropy_with_logits(model(data.test_x, test_ids), data.test_y)),
        300,
    )


class ActorCritic(nn.Module):
    """Two perceptrons with tanh, initialized as in the reference implementations of PPO."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.actor, self.critic = (
            nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, out))
            for out in (2, 1)
        )
        self.log_std = nn.Parameter(torch.full((2,), -0.5))
        for net, gain in ((self.actor, 0.01), (self.critic, 1.0)):
            for layer in net[::2]:
                nn.init.orthogonal_(layer.weight, gain if layer is net[-1] else math.sqrt(2))
                nn.init.zeros_(layer.bias)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(state), self.critic(state).squeeze(-1)


def moved(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Push a point mass on a curved slope; return where it is then and what that costs, at most 1."""
    position, velocity = state.chunk(2, -1)
    force = action.clamp(-2, 2) + 0.5 * torch.sin(2 * position) + 0.3 * position.flip(-1)
    velocity = 0.95 * velocity + 0.1 * force
    position = position + 0.1 * velocity
    cost = position.square().sum(-1) + 0.1 * velocity.square().sum(-1) + 0.01 * action.square().sum(-1)
    return torch.cat((position, velocity), -1).clamp(-5, 5), cost / (1 + cost)


def actor_critic(seed: int, width: float = 1.0) -> Run:
    """Make a run of advantage actor-critic; evaluated by the mean cost from fixed starts plus the values' error."""
    torch.manual_seed(seed)
    model = ActorCritic(wide(64, width))
    source = private(seed)
    starts = 1.5 * torch.randn(128, 4, generator=torch.Generator().manual_seed(0))
    state = 1.5 * torch.randn(64, 4, generator=source)
    discount, horizon = 0.95, 16

    def loss() -> Tensor:
        nonlocal state
        states, actions, costs = [], [], []
        with torch.no_grad():
            fresh = torch.rand(64, 1, generator=source) < 0.2
            state = torch.where(fresh, 1.5 * torch.randn(64, 4, generator=source), state)
            for _ in range(horizon):
                mean = model.actor(state)
                action = mean + model.log_std.exp() * torch.randn(64, 2, generator=source)
                states.append(state)
                actions.append(action)
                state, cost = moved(state, action)
                costs.append(cost)
            total = model.critic(state).squeeze(-1)
            returns = []
            for cost in reversed(costs):
                total = (1 - discount) * -cost + discount * total
                returns.append(total)
        target = torch.stack(returns[::-1]).flatten()
        mean, value = model(torch.stack(states).flatten(0, 1))
        policy = torch.distributions.Normal(mean, model.log_std.exp())
        advantage = (target - value).detach()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        log = policy.log_prob(torch.stack(actions).flatten(0, 1)).sum(-1)
        gain = (log * advantage).mean() + 1e-3 * policy.entropy().sum(-1).mean()
        return 0.5 * (target - value).square().mean() - gain

    def total_cost() -> Tensor:
        current, values, costs = starts, [], []
        for _ in range(60):
            action, value = model(current)
            values.append(value)
            current, cost = moved(current, action)
            costs.append(cost)
        total, errors = -costs[-1], []
        for cost, value in zip(reversed(costs), reversed(values), strict=True):
            total = (1 - discount) * -cost + discount * total
            errors.append((value - total).square())
        return torch.stack(costs).mean() + torch.stack(errors).mean()

    optimizers = [
        Adam([*model.actor.parameters(), model.log_std], lr=1.2e-2, eps=1e-5),
        Adam(model.critic.parameters(), lr=1.2e-2, eps=1e-5),
    ]
    return Run(model, optimizers, loss, fixed(model, total_cost), 250, clip=0.5)
