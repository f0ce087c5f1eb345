"""Networks that multiply what a step does, by factors behind layers or by curvature, which norms do not show.

The rule that shortens steps was found on these; those of ``steep_heldout`` were run when it stood.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim import Adam

from benchmarks.recipes.development.common import digit_split, fixed, private
from benchmarks.recipes.recipe import Recipe
from benchmarks.recipes.run import Run, cosine

STEPS = 400


def perceptron(*widths: int, act: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), act()]
    return nn.Sequential(*layers[:-1])


def trained(model: nn.Module, loss: Callable[[], Tensor], evaluate: Callable[[], Tensor], lr: float) -> Run:
    return Run(model, [Adam(model.parameters(), lr=lr)], loss, fixed(model, evaluate), STEPS, cosine(STEPS))


def square(count: int, generator: torch.Generator) -> Tensor:
    """Return points of a square around 0."""
    return torch.rand(count, 2, generator=generator) * 2 - 1


def image(x: Tensor) -> Tensor:
    """Return an image with an edge in it, at some points (N, 2)."""
    waves = torch.sin(9 * x[:, :1]) * torch.cos(7 * x[:, 1:])
    return waves + 0.5 * torch.sign(torch.sin(5 * x[:, :1] * x[:, 1:]))


SQUARE = square(2000, torch.Generator().manual_seed(5))


def of_image(model: nn.Module, seed: int, lr: float, points: Tensor = SQUARE) -> Run:
    """Learn the image from some of its points; ``points`` are those that a run is judged by."""
    source = private(seed)

    def error(x: Tensor) -> Tensor:
        return mse_loss(model(x), image(x))

    return trained(model, lambda: error(square(1024, source)), lambda: error(points), lr)


def of_digits(model: nn.Module, seed: int, flat: bool = True) -> Run:
    """Classify digits with Adam at 1e-3."""
    source, data = private(seed), digit_split()
    x, test = (part.flatten(1) if flat else part.view(-1, 8, 8) for part in (data.x, data.test_x))

    def loss() -> Tensor:
        rows = torch.randint(len(x), (64,), generator=source)
        return cross_entropy(model(x[rows]), data.y[rows])

    return trained(model, loss, lambda: cross_entropy(model(test), data.test_y), 1e-3)


class Sine(nn.Module):
    """A layer of a SIREN: the sine of 30 times what its weights make."""

    def __init__(self, fan_in: int, fan_out: int, first: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(fan_in, fan_out)
        bound = 1 / fan_in if first else math.sqrt(6 / fan_in) / 30
        nn.init.uniform_(self.linear.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(30 * self.linear(x))


def siren(seed: int, width: float) -> Run:
    torch.manual_seed(seed)
    n = round(128 * width)
    model = nn.Sequential(Sine(2, n, True), Sine(n, n), Sine(n, n), nn.Linear(n, 1))
    nn.init.uniform_(model[-1].weight, -math.sqrt(6 / n) / 30, math.sqrt(6 / n) / 30)
    return of_image(model, seed, 1e-4)


class Coupling(nn.Module):
    """An affine coupling: half of the numbers are scaled and shifted by what the others say."""

    def __init__(self, size: int, width: int, flip: bool) -> None:
        super().__init__()
        self.net = perceptron(size // 2, width, width, size, act=nn.ReLU)
        self.flip = flip

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.chunk(2, 1)[::-1] if self.flip else x.chunk(2, 1)
        scale, shift = self.net(a).chunk(2, 1)
        scale = scale.tanh()
        b = b * scale.exp() + shift
        return torch.cat((b, a) if self.flip else (a, b), 1), scale.sum(1)


class Flow(nn.Module):
    """Gives the negative log likelihood of points under a RealNVP."""

    def __init__(self, size: int, couplings: int, width: int) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(Coupling(size, width, bool(i % 2)) for i in range(couplings))

    def forward(self, x: Tensor) -> Tensor:
        volume = torch.zeros(len(x))
        for coupling in self.couplings:
            x, change = coupling(x)
            volume = volume + change
        return (x.square().sum(1) / 2 + x.shape[1] * math.log(2 * math.pi) / 2 - volume).mean()


def moons(count: int, generator: torch.Generator) -> Tensor:
    """Return points of two half circles (N, 2)."""
    angle = torch.rand(count, generator=generator) * math.pi
    upper = torch.randint(2, (count,), generator=generator) == 0
    x = torch.where(upper, angle.cos(), 1 - angle.cos())
    y = torch.where(upper, angle.sin(), 0.5 - angle.sin())
    return torch.stack([x, y], 1) + 0.05 * torch.randn(count, 2, generator=generator)


def flow(seed: int, width: float) -> Run:
    torch.manual_seed(seed)
    model, source, test = Flow(2, 6, round(64 * width)), private(seed), moons(2000, torch.Generator().manual_seed(5))
    return trained(model, lambda: model(moons(512, source)), lambda: model(test), 1e-3)


def slope(y: Tensor, x: Tensor) -> Tensor:
    """Return the derivatives of outputs, each by its own input."""
    return torch.autograd.grad(y.sum(), x, create_graph=True)[0]


def physics(seed: int, width: float) -> Run:
    """Solve ``u'' + 16 u = 0`` with ``u(0) = 1, u'(0) = 0`` for one and a quarter swings, by its residual."""
    torch.manual_seed(seed)
    n, source = round(64 * width), private(seed)
    model, times = perceptron(1, n, n, n, 1), torch.linspace(0, 2, 200)[:, None]

    def residual() -> Tensor:
        x, start = 2 * torch.rand(256, 1, generator=source), torch.zeros(1, 1, requires_grad=True)
        u = model(x.requires_grad_())
        inside = (slope(slope(u, x), x) + 16 * u).square().mean() / 100
        return inside + (model(start) - 1).square().mean() + slope(model(start), start).square().mean()

    return trained(model, residual, lambda: mse_loss(model(times), torch.cos(4 * times)), 1e-3)


class Quantized(nn.Module):
    """A VQ-VAE of digits: 8 codes of 64 for each, straight through."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encoder = perceptron(64, width, 64, act=nn.ReLU)
        self.codes = nn.Embedding(64, 8)
        self.decoder = perceptron(64, width, 64, act=nn.ReLU)
        nn.init.uniform_(self.codes.weight, -1 / 64, 1 / 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(x).view(-1, 8, 8)
        q = self.codes((z[:, :, None] - self.codes.weight).square().sum(-1).argmin(-1))
        commitment = mse_loss(q, z.detach()) + 0.25 * mse_loss(z, q.detach())
        return self.decoder((z + (q - z).detach()).flatten(1)), commitment


def quantized(seed: int, width: float) -> Run:
    torch.manual_seed(seed)
    model, source, data = Quantized(round(128 * width)), private(seed), digit_split()
    x, test = data.x.flatten(1), data.test_x.flatten(1)

    def loss() -> Tensor:
        rows = x[torch.randint(len(x), (64,), generator=source)]
        output, commitment = model(rows)
        return mse_loss(output, rows) + commitment

    return trained(model, loss, lambda: mse_loss(model(test)[0], test), 1e-3)


class Filters(nn.Module):
    """A multiplicative filter network (Fathony and others, 2021): sines multiplied by what came before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.filters = nn.ModuleList(nn.Linear(2, width) for _ in range(4))
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, 1)
        for layer in self.filters:
            nn.init.normal_(layer.weight, std=8.0)
            nn.init.uniform_(layer.bias, -math.pi, math.pi)

    def forward(self, x: Tensor) -> Tensor:
        h = self.filters[0](x).sin()
        for layer, linear in zip(list(self.filters)[1:], self.linears, strict=True):
            h = layer(x).sin() * linear(h)
        return self.out(h)


def filters(seed: int, width: float) -> Run:
    torch.manual_seed(seed)
    return of_image(Filters(round(128 * width)), seed, 1e-2)


def hamiltonian(seed: int, width: float) -> Run:
    """Learn a pendulum's energy from its motion (Greydanus and others, 2019): the loss is of derivatives."""
    torch.manual_seed(seed)
    model, source = perceptron(2, round(128 * width), round(128 * width), 1), private(seed)

    def error(x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = (2 * x).requires_grad_()
            energy = slope(model(x), x)
        motion = torch.stack([x[:, 1], -torch.sin(x[:, 0])], 1)
        return mse_loss(torch.stack([energy[:, 1], -energy[:, 0]], 1), motion)

    return trained(model, lambda: error(square(256, source)), lambda: error(SQUARE), 1e-3)


def differential(seed: int, width: float) -> Run:
    """Learn a spiral from its ends, through 20 Runge-Kutta steps of a network."""
    torch.manual_seed(seed)
    model, source = perceptron(2, round(64 * width), round(64 * width), 2), private(seed)
    turn = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])

    def end(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        for _ in range(20):
            x = x + 0.1 * f(x + 0.05 * f(x))
        return x

    def error(x: Tensor) -> Tensor:
        return mse_loss(end(model, x), end(lambda y: y.pow(3) @ turn, x))

    return trained(model, lambda: error(square(128, source)), lambda: error(SQUARE), 1e-3)


class Hyper(nn.Module):
    """A network whose weights another one makes, from a code of the digits' quarter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.maker = perceptron(4, width, 64 * width + 10 * width, act=nn.ReLU)

    def forward(self, x: Tensor) -> Tensor:
        code = x.view(-1, 4, 16).mean(2)
        made = self.maker(code)
        first, second = made.split([64 * self.width, 10 * self.width], 1)
        h = torch.einsum("bi,bio->bo", x, first.view(-1, 64, self.width)).relu()
        return torch.einsum("bi,bio->bo", h, second.view(-1, self.width, 10))


def hyper(seed: int, width: float) -> Run:
    torch.manual_seed(seed)
    return of_digits(Hyper(round(32 * width)), seed)


def digits_flow(seed: int, width: float) -> Run:
    torch.manual_seed(seed)
    model, source, data = Flow(64, 8, round(128 * width)), private(seed), digit_split()
    x, test = data.x.flatten(1), data.test_x.flatten(1)
    noise = 0.1 * torch.randn(test.shape, generator=torch.Generator().manual_seed(5))

    def loss() -> Tensor:
        rows = x[torch.randint(len(x), (128,), generator=source)]
        return model(rows + 0.1 * torch.randn(rows.shape, generator=source)) / 64

    return trained(model, loss, lambda: model(test + noise) / 64, 1e-3)


RECIPES = (
    Recipe("SIREN, Adam", siren, "development", "Sitzmann et al., 2020: lr 1e-4"),
    Recipe("RealNVP of moons, Adam", flow, "development", "Dinh et al., 2017"),
    Recipe("PINN, Adam", physics, "development", "Raissi et al., 2019"),
    Recipe("VQ-VAE, Adam", quantized, "development", "van den Oord et al., 2017"),
    Recipe("multiplicative filters, Adam", filters, "development", "Fathony et al., 2021: lr 1e-2"),
    Recipe("Hamiltonian net, Adam", hamiltonian, "development", "Greydanus et al., 2019: lr 1e-3"),
    Recipe("neural ODE, Adam", differential, "development", "Chen et al., 2018"),
    Recipe("hypernetwork, Adam", hyper, "development", "Ha et al., 2017"),
    Recipe("RealNVP of digits, Adam", digits_flow, "development", "Dinh et al., 2017"),
)
