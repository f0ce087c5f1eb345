"""More networks whose loss norms do not explain: run once, when the rule that shortens steps stood."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, logsigmoid, mse_loss, normalize, softplus
from torch.optim import SGD, AdamW

from benchmarks.rates.steep import STEPS, moons, of_digits, of_image, perceptron, square, trained
from benchmarks.recipes.development.common import digit_split, fixed, private
from benchmarks.recipes.recipe import Recipe
from benchmarks.recipes.run import Run, cosine


class Adding(nn.Module):
    """A plain recurrent net that adds two marked numbers of 40 (Hochreiter and Schmidhuber, 1997)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rnn = nn.RNN(2, width, batch_first=True)
        self.head = nn.Linear(width, 1)
        nn.init.eye_(self.rnn.weight_hh_l0)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def sums(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return sequences of numbers and flags (N, 40, 2), and sums of flagged numbers (N, 1)."""
    numbers, flags = torch.rand(count, 40, generator=generator), torch.zeros(count, 40)
    for half in (0, 20):
        flags.scatter_(1, torch.randint(half, half + 20, (count, 1), generator=generator), 1.0)
    return torch.stack([numbers, flags], 2), (numbers * flags).sum(1, keepdim=True)


def adding(seed: int, width: float) -> Run:
    torch.manual_seed(seed)
    model, source = Adding(round(64 * width)), private(seed)
    x, y = sums(1000, torch.Generator().manual_seed(5))

    def loss() -> Tensor:
        rows, wanted = sums(64, source)
        return mse_loss(model(rows), wanted)

    return trained(model, loss, lambda: mse_loss(model(x), y), 1e-3)


class Plain(nn.Module):
    """Attention and perceptrons with residuals and no normalization, over the rows of digits."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed, self.position = nn.Linear(8, width), nn.Parameter(0.02 * torch.randn(8, width))
        self.attention = nn.ModuleList(nn.MultiheadAttention(width, 4, batch_first=True) for _ in range(depth))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(depth)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.position
        for attend, mlp in zip(self.attention, self.mlps, strict=True):
            h = h + attend(h, h, h, need_weights=False)[0]
            h = h + mlp(h)
        return self.head(h.mean(1))


def unnormalized(seed: int, width: float) -> Run:
    torch.manual_seed(seed)
    return of_digits(Plain(round(64 * width), 6), seed, flat=False)


class Equilibrium(nn.Module):
    """Applies one layer 30 times, from zero (a deep equilibrium net, Bai and others, 2019, unrolled)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inward, self.inner, self.head = nn.Linear(64, width), nn.Linear(width, width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        injected, h = self.inward(x), torch.zeros(len(x), self.inner.in_features)
        for _ in range(30):
            h = torch.tanh(injected + self.inner(h))
        return self.head(h)


def equilibrium(seed: int, width: float) -> Run:
    torch.manual_seed(seed)
    return of_digits(Equilibrium(round(128 * width)), seed)


def contrast(seed: int, width: float) -> Run:
    """Pairs of noisy digits, told from others at a temperature of 0.05 (van den Oord and others, 2018)."""
    torch.manual_seed(seed)
    n, source, data = round(128 * width), private(seed), digit_split()
    model, x, test = perceptron(64, n, n, 32, act=nn.ReLU), data.x.flatten(1), data.test_x.flatten(1)[:256]

    def error(rows: Tensor, generator: torch.Generator) -> Tensor:
        views = [rows + 0.5 * torch.randn(rows.shape, generator=generator) for _ in range(2)]
        a, b = (normalize(model(view), dim=1) for view in views)
        return cross_entropy(a @ b.mT / 0.05, torch.arange(len(rows)))

    return trained(
        model,
        lambda: error(x[torch.randint(len(x), (128,), generator=source)], source),
        lambda: error(test, torch.Generator().manual_seed(5)),
        1e-3,
    )


def densities(seed: int, width: float) -> Run:
    """A mixture density network (Bishop, 1994) of a curve that goes back on itself."""
    torch.manual_seed(seed)
    n, source = round(64 * width), private(seed)
    model = perceptron(1, n, n, 15)

    def error(count: int, generator: torch.Generator) -> Tensor:
        y = 2 * torch.rand(count, 1, generator=generator) - 1
        x = y + 0.3 * torch.sin(2 * math.pi * y) + 0.05 * torch.randn(count, 1, generator=generator)
        mean, scale, part = model(x).chunk(3, 1)
        each = -((y - mean) ** 2) / (2 * (2 * scale).exp()) - scale - math.log(2 * math.pi) / 2
        return -torch.logsumexp(each + part.log_softmax(1), 1).mean()

    return trained(model, lambda: error(256, source), lambda: error(4000, torch.Generator().manual_seed(5)), 1e-3)


def score(seed: int, width: float) -> Run:
    """Score matching of moons at noises from 0.01 to 1 (Song and Ermon, 2019)."""
    torch.manual_seed(seed)
    n, source = round(128 * width), private(seed)
    model = perceptron(3, n, n, n, 2, act=nn.SiLU)

    def error(count: int, generator: torch.Generator) -> Tensor:
        noise, level = (
            torch.randn(count, 2, generator=generator),
            10 ** (-2 * torch.rand(count, 1, generator=generator)),
        )
        x = moons(count, generator) + level * noise
        return (model(torch.cat([x, level.log()], 1)) + noise).square().mean()

    return trained(model, lambda: error(512, source), lambda: error(4000, torch.Generator().manual_seed(5)), 1e-3)


def linear(seed: int, width: float) -> Run:
    """16 linear layers under SGD with momentum."""
    torch.manual_seed(seed)
    n = round(64 * width)
    layers = [nn.Linear(64, n), *(nn.Linear(n, n) for _ in range(14)), nn.Linear(n, 10)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight)
    run = of_digits(nn.Sequential(*layers), seed)
    run.optimizers = [SGD(run.model.parameters(), lr=1e-2, momentum=0.9)]
    return run


class Waves(nn.Module):
    """A perceptron of random Fourier features (Tancik and others, 2020)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("waves", 4 * math.pi * torch.randn(2, width // 2))
        self.net = perceptron(width, width, width, 1, act=nn.ReLU)

    def forward(self, x: Tensor) -> Tensor:
        angles = x @ self.waves
        return self.net(torch.cat([angles.sin(), angles.cos()], 1))


def fourier(seed: int, width: float) -> Run:
    torch.manual_seed(seed)
    return of_image(Waves(round(128 * width)), seed, 5e-4, SQUARE)


SQUARE = square(2000, torch.Generator().manual_seed(6))


def operator(seed: int, width: float) -> Run:
    """A DeepONet (Lu and others, 2021) that integrates functions."""
    torch.manual_seed(seed)
    n, source = round(64 * width), private(seed)
    branch, trunk = perceptron(20, n, n, act=nn.ReLU), perceptron(1, n, n, act=nn.ReLU)
    model, at = nn.ModuleList([branch, trunk]), torch.linspace(0, 1, 20)

    def error(count: int, generator: torch.Generator) -> Tensor:
        waves, end = 4 * torch.randn(count, 3, generator=generator), torch.rand(count, 1, generator=generator)
        heights = torch.randn(count, 3, generator=generator)
        values = (heights[:, None] * torch.cos(waves[:, None] * at[:, None])).sum(2)
        integral = (heights * torch.sin(waves * end) / waves).sum(1)
        return mse_loss((branch(values) * trunk(end)).sum(1), integral)

    return trained(model, lambda: error(256, source), lambda: error(4000, torch.Generator().manual_seed(5)), 1e-3)


def ranking(seed: int, width: float) -> Run:
    """Preferences between digits, by a learnt reward with weight decay (Bradley and Terry)."""
    torch.manual_seed(seed)
    n, source, data = round(128 * width), private(seed), digit_split()
    model, x, test = perceptron(64, n, n, 1, act=nn.ReLU), data.x.flatten(1), data.test_x.flatten(1)

    def error(rows: Tensor, grades: Tensor, generator: torch.Generator) -> Tensor:
        a, b = (torch.randint(len(rows), (256,), generator=generator) for _ in range(2))
        rewards = model(rows).squeeze(1)
        sign = torch.sign((grades[a] - grades[b]).float())
        return -(sign.abs() * logsigmoid(sign * (rewards[a] - rewards[b]))).mean() + softplus(-rewards.var()) / 10

    def loss() -> Tensor:
        rows = torch.randint(len(x), (256,), generator=source)
        return error(x[rows], data.y[rows], source)

    def evaluate() -> Tensor:
        return error(test, data.test_y, torch.Generator().manual_seed(5))

    optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    return Run(model, [optimizer], loss, fixed(model, evaluate), STEPS, cosine(STEPS))


RECIPES = (
    Recipe("adding two numbers, Adam", adding, "held out", "Le et al., 2015: IRNN"),
    Recipe("transformer without norms, Adam", unnormalized, "held out", ""),
    Recipe("unrolled equilibrium, Adam", equilibrium, "held out", "Bai et al., 2019"),
    Recipe("InfoNCE, Adam", contrast, "held out", "van den Oord et al., 2018"),
    Recipe("mixture density net, Adam", densities, "held out", "Bishop, 1994"),
    Recipe("score matching, Adam", score, "held out", "Song and Ermon, 2019"),
    Recipe("deep linear net, SGD", linear, "held out", ""),
    Recipe("Fourier features, Adam", fourier, "held out", "Tancik et al., 2020: lr 5e-4"),
    Recipe("DeepONet, Adam", operator, "held out", "Lu et al., 2021: lr 1e-3"),
    Recipe("preferences, AdamW", ranking, "held out", ""),
)
