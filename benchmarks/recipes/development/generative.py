"""Development recipes that reconstruct or generate images: autoencoders and a diffusion model."""

from __future__ import annotations

import math
from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import binary_cross_entropy_with_logits, interpolate, mse_loss, silu
from torch.optim import Adam, AdamW

from benchmarks.recipes.development.common import Split, fixed, image_split, private, split, wide
from benchmarks.recipes.run import Run, warmup_cosine


@cache
def pixels() -> Split:
    """Return the digits as they are, between 0 and 1."""
    x, y = (torch.as_tensor(array) for array in load_digits(return_X_y=True))
    return split(x.float() / 16, y, 360)


class Autoencoder(nn.Module):
    """A perceptron with a bottleneck."""

    def __init__(self, width: int, code: int = 32) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(768, width), nn.ReLU(), nn.Linear(width, width // 2), nn.ReLU(), nn.Linear(width // 2, code)
        )
        self.decoder = nn.Sequential(
            nn.Linear(code, width // 2), nn.ReLU(), nn.Linear(width // 2, width), nn.ReLU(), nn.Linear(width, 768)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


def autoencoder(seed: int, width: float = 1.0) -> Run:
    torch.manual_seed(seed)
    model = Autoencoder(wide(256, width, 2))
    data = image_split(16)
    x, test = data.x.flatten(1), data.test_x.flatten(1)
    source = private(seed)

    def loss() -> Tensor:
        batch = x[torch.randint(len(x), (128,), generator=source)]
        return mse_loss(model(batch), batch)

    return Run(
        model,
        [Adam(model.parameters(), lr=1e-3)],
        loss,
        fixed(model, lambda: mse_loss(model(test), test)),
        250,
    )


class VAE(nn.Module):
    """A variational autoencoder with one hidden layer on either side (Kingma and Welling, 2014)."""

    def __init__(self, width: int, code: int = 8) -> None:
        super().__init__()
        self.enc = nn.Linear(64, width)
        self.mu, self.log_var = nn.Linear(width, code), nn.Linear(width, code)
        self.dec = nn.Linear(code, width)
        self.out = nn.Linear(width, 64)

    def forward(self, x: Tensor, noise: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
        h = self.enc(x).relu()
        mu, log_var = self.mu(h), self.log_var(h)
        return self.out(self.dec(mu + noise * (0.5 * log_var).exp()).relu()), mu, log_var


def vae(seed: int, width: float = 1.0) -> Run:
    """Make a run evaluated by the negative evidence bound, in nats, of the test digits at the mean codes."""
    torch.manual_seed(seed)
    model = VAE(wide(128, width))
    x, test = pixels().x, pixels().test_x
    source = private(seed)

    def bound(batch: Tensor, noise: Tensor | float) -> Tensor:
        logits, mu, log_var = model(batch, noise)
        errors = binary_cross_entropy_with_logits(logits, batch, reduction="none").sum(1)
        divergence = 0.5 * (mu.square() + log_var.exp() - 1 - log_var).sum(1)
        return (errors + divergence).mean()

    def loss() -> Tensor:
        batch = x[torch.randint(len(x), (64,), generator=source)]
        return bound(batch, torch.randn(64, 8, generator=source))

    return Run(model, [Adam(model.parameters(), lr=4e-3)], loss, fixed(model, lambda: bound(test, 0.0)), 300)


class Level(nn.Module):
    """A residual block with group norm that is told the time."""

    def __init__(self, before: int, after: int, time: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, before), nn.GroupNorm(8, after)
        self.conv1, self.conv2 = nn.Conv2d(before, after, 3, 1, 1), nn.Conv2d(after, after, 3, 1, 1)
        self.time = nn.Linear(time, after)
        self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()
        nn.init.zeros_(self.conv2.weight)
        nn.init.zeros_(self.conv2.bias)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = self.conv1(silu(self.norm1(x))) + self.time(silu(t))[:, :, None, None]
        return self.skip(x) + self.conv2(silu(self.norm2(h)))


class UNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, time = width, 4 * width
        self.time1, self.time2 = nn.Linear(width, time), nn.Linear(time, time)
        self.into = nn.Conv2d(1, width, 3, 1, 1)
        self.down1 = Level(width, width, time)
        self.down = nn.Conv2d(width, width, 3, 2, 1)
        self.down2 = Level(width, 2 * width, time)
        self.middle = Level(2 * width, 2 * width, time)
        self.up = nn.Conv2d(2 * width, width, 3, 1, 1)
        self.up1 = Level(2 * width, width, time)
        self.norm = nn.GroupNorm(8, width)
        self.out = nn.Conv2d(width, 1, 3, 1, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        half = self.width // 2
        angles = 1000 * t[:, None] * torch.exp(-math.log(10000) * torch.arange(half) / half)
        time = self.time2(silu(self.time1(torch.cat((angles.sin(), angles.cos()), 1))))
        early = self.down1(self.into(x), time)
        h = self.middle(self.down2(self.down(early), time), time)
        h = self.up(interpolate(h, scale_factor=2.0))
        return self.out(silu(self.norm(self.up1(torch.cat((h, early), 1), time))))


class Average:
    """An exponential moving average of a model's parameters, begun at the first step."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        self.values: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self) -> None:
        for name, p in self.model.named_parameters():
            if name in self.values:
                self.values[name].lerp_(p, 1 - self.decay)
            else:
                self.values[name] = p.detach().clone()

    def __call__(self, *inputs: Tensor) -> Tensor:
        return functional_call(self.model, self.values, inputs)


def diffusion(seed: int, width: float = 1.0) -> Run:
    """Make a run that predicts noise, evaluated at fixed times and noises with the averaged weights."""
    torch.manual_seed(seed)
    model = UNet(wide(16, width, 8))
    x, test = (2 * part.view(-1, 1, 8, 8) - 1 for part in (pixels().x, pixels().test_x))
    source = private(seed)
    average = Average(model, 0.98)

    def noised(clean: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        t, noise = torch.rand(len(clean), generator=generator), torch.randn(clean.shape, generator=generator)
        angle = (0.5 * math.pi * t.clamp(0.001, 0.999))[:, None, None, None]
        return angle.cos() * clean + angle.sin() * noise, t, noise

    fixed_x, fixed_t, fixed_noise = noised(test, torch.Generator().manual_seed(0))

    def loss() -> Tensor:
        batch, t, noise = noised(x[torch.randint(len(x), (64,), generator=source)], source)
        return mse_loss(model(batch, t), noise)

    return Run(
        model,
        [AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)],
        loss,
        fixed(model, lambda: mse_loss(average(fixed_x, fixed_t), fixed_noise)),
        200,
        schedule=warmup_cosine(200, warmup=0.1, floor=1.0),
        clip=1.0,
        after_step=average.update,
    )
