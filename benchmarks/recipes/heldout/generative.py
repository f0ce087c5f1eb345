"""Models of data: autoencoders, an adversarial pair, a diffusion model."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, interpolate, leaky_relu, mse_loss, silu
from torch.optim import Adam, AdamW

from benchmarks.rates.tuned import digits
from benchmarks.recipes.heldout.data import HELD_OUT, decayed, seeded, still, wide
from benchmarks.recipes.recipe import Recipe
from benchmarks.recipes.run import Run, cosine, warmup_cosine


@cache
def strokes() -> Tensor:
    """Digits of 8 by 8 pixels between 0 and 1, mixed."""
    x = digits()[0]
    low, high = x.amin(0), x.amax(0)
    x = ((x - low) / (high - low).clamp(min=1e-6)).view(-1, 1, 8, 8)
    return x[torch.randperm(len(x), generator=seeded(3))]


class Draws:
    """Rows of data in random batches, the last ones held back."""

    def __init__(self, data: Tensor, size: int, seed: int, held_out: int = HELD_OUT) -> None:
        self.data, self.held_out, self.size = data[:-held_out], data[-held_out:], size
        self.generator = seeded(seed)

    def __call__(self) -> Tensor:
        return self.data[torch.randint(len(self.data), (self.size,), generator=self.generator)]


class SparseAutoencoder(nn.Module):
    """Non-negative codes, decoded by unit directions."""

    def __init__(self, inputs: int, codes: int) -> None:
        super().__init__()
        self.encoder = nn.Linear(inputs, codes)
        self.decoder = nn.Linear(codes, inputs)
        self.unit()
        with torch.no_grad():
            self.encoder.weight.copy_(self.decoder.weight.T)
            nn.init.zeros_(self.encoder.bias)
            nn.init.zeros_(self.decoder.bias)

    def unit(self) -> None:
        with torch.no_grad():
            self.decoder.weight.div_(self.decoder.weight.norm(dim=0).clamp(min=1e-8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        codes = self.encoder(x - self.decoder.bias).relu()
        return self.decoder(codes), codes


@cache
def superposed(count: int = 20000, features: int = 120, inputs: int = 48) -> Tensor:
    """Sparse combinations of more directions than there are dimensions, of unit variance."""
    generator = seeded(23)
    directions = torch.randn(features, inputs, generator=generator)
    directions = directions / directions.norm(dim=1, keepdim=True)
    active = torch.rand(count, features, generator=generator) < 0.04
    x = (active * (0.5 + torch.rand(count, features, generator=generator))) @ directions
    return (x - x.mean(0)) / x.std()


def sparse_autoencoder(seed: int, width: float) -> Run:
    torch.manual_seed(seed)
    model, steps = SparseAutoencoder(48, wide(256, width)), 250
    draw = Draws(superposed(), 256, seed)

    def of(x: Tensor) -> Tensor:
        reconstruction, codes = model(x)
        return (reconstruction - x).square().sum(1).mean() + 0.5 * codes.sum(1).mean()

    def evaluate() -> float:
        """The training objective per dimension."""
        with still(model):
            return of(draw.held_out).item() / 48

    optimizer = Adam(model.parameters(), lr=4e-3, betas=(0.9, 0.999))
    schedule = warmup_cosine(steps, 0.05, 0.1)
    return Run(model, [optimizer], lambda: of(draw()), evaluate, steps, schedule, after_step=model.unit)


class VAE(nn.Module):
    """Strided convolutions to means and variances, and back."""

    def __init__(self, width: float, latent: int = 10) -> None:
        super().__init__()
        a = wide(24, width)
        self.latent = latent
        self.conv1, self.conv2 = nn.Conv2d(1, a, 4, 2, 1), nn.Conv2d(a, 2 * a, 4, 2, 1)
        self.to_latent = nn.Linear(8 * a, 2 * latent)
        self.from_latent = nn.Linear(latent, 8 * a)
        self.deconv1 = nn.ConvTranspose2d(2 * a, a, 4, 2, 1)
        self.deconv2 = nn.ConvTranspose2d(a, 1, 4, 2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.conv2(self.conv1(x).relu()).relu()
        mean, logvar = self.to_latent(h.flatten(1)).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (0.5 * logvar).exp() if self.training else mean
        h = self.from_latent(z).relu().unflatten(1, (-1, 2, 2))
        return self.deconv2(self.deconv1(h).relu()), mean, logvar


def vae(seed: int, width: float) -> Run:
    torch.manual_seed(seed)
    model, steps = VAE(width), 250
    draw = Draws(strokes(), 64, seed, 400)

    def of(x: Tensor) -> Tensor:
        logits, mean, logvar = model(x)
        reconstruction = binary_cross_entropy_with_logits(logits, x, reduction="none").flatten(1).sum(1)
        divergence = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).sum(1)
        return (reconstruction + divergence).mean()

    def evaluate() -> float:
        """The bound per pixel at the mean code, in nats above the entropy of the pixels themselves."""
        with still(model):
            x = draw.held_out.clamp(1e-6, 1 - 1e-6)
            floor = -(x * x.log() + (1 - x) * (1 - x).log()).mean()
            return (of(draw.held_out) / 64 - floor).item()

    optimizer = Adam(model.parameters(), lr=2e-3)
    return Run(model, [optimizer], lambda: of(draw()), evaluate, steps)


class GAN(nn.Module):
    """DCGAN's two networks for 16 by 16 pixels; forward gives both opinions of the discriminator."""

    def __init__(self, width: float, latent: int = 32) -> None:
        super().__init__()
        a = wide(16, width)
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(latent, 4 * a, 4, 1, 0, bias=False),
            nn.BatchNorm2d(4 * a),
            nn.ReLU(),
            nn.ConvTranspose2d(4 * a, 2 * a, 4, 2, 1, bias=False),
            nn.BatchNorm2d(2 * a),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * a, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )
        self.conv1, self.conv2 = nn.Conv2d(1, a, 4, 2, 1, bias=False), nn.Conv2d(a, 2 * a, 4, 2, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(2 * a)
        self.judge = nn.Conv2d(2 * a, 1, 4, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, nn.BatchNorm2d):
                nn.init.normal_(module.weight, 1.0, 0.02)

    def discriminate(self, x: Tensor) -> Tensor:
        h = leaky_relu(self.bn2(self.conv2(leaky_relu(self.conv1(x), 0.2))), 0.2)
        return self.judge(h).flatten()

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        return self.discriminate(x), self.discriminate(self.generator(noise).detach())


def frechet(x: Tensor, y: Tensor) -> float:
    """Distance of two normal distributions with the samples' moments, as a share of the first one's variance."""
    x, y = x.flatten(1).double(), y.flatten(1).double()
    if not y.isfinite().all():
        return math.inf
    a, b = x.T.cov(), y.T.cov()
    cross = torch.linalg.eigvals(a @ b).real.clamp(min=0).sqrt().sum()
    return (((x.mean(0) - y.mean(0)).square().sum() + a.trace() + b.trace() - 2 * cross) / a.trace()).item()


def gan(seed: int, width: float) -> Run:
    torch.manual_seed(seed)
    model, steps, bce = GAN(width), 200, binary_cross_entropy_with_logits
    draw = Draws(2 * interpolate(strokes(), (16, 16)) - 1, 48, seed, 500)
    fixed = torch.randn(500, 32, 1, 1, generator=seeded(0))
    critic = [p for name, p in model.named_parameters() if not name.startswith("generator.")]
    optimizers = [
        Adam(critic, lr=4e-4, betas=(0.5, 0.999)),
        Adam(model.generator.parameters(), lr=1.6e-3, betas=(0.5, 0.999)),
    ]

    def loss() -> Tensor:
        real, fake = model(draw(), torch.randn(48, 32, 1, 1, generator=draw.generator))
        return bce(real, torch.ones_like(real)) + bce(fake, torch.zeros_like(fake))

    def update(run: Run) -> None:
        for optimizer, objective in zip(run.optimizers, (run.loss, fooled), strict=True):
            if run.zero_grad:
                optimizer.zero_grad()
            objective().backward()
            run.clip_gradients()
            for _ in range(run.repeats):
                optimizer.step()

    def fooled() -> Tensor:
        noise = torch.randn(48, 32, 1, 1, generator=draw.generator)
        fake = model.discriminate(model.generator(noise))
        return bce(fake, torch.ones_like(fake))

    def evaluate() -> float:
        """Distance of the pixels' moments from real ones'."""
        with still(model):
            return frechet(draw.held_out, model.generator(fixed))

    return Run(model, optimizers, loss, evaluate, steps, update=update, roles={"judge": "readout"})


class NoisePredictor(nn.Module):
    """A residual perceptron that is told the noise level."""

    def __init__(self, d: int, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(64, d)
        self.time = nn.Sequential(nn.Linear(16, d), nn.SiLU(), nn.Linear(d, d))
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(depth))
        self.into = nn.ModuleList(nn.Linear(d, 2 * d) for _ in range(depth))
        self.back = nn.ModuleList(nn.Linear(2 * d, d) for _ in range(depth))
        self.norm = nn.LayerNorm(d)
        self.out = nn.Linear(d, 64)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angles = t[:, None] * 2.0 ** torch.arange(8)
        time = self.time(torch.cat((angles.sin(), angles.cos()), 1))
        h = self.embed(x)
        for norm, into, back in zip(self.norms, self.into, self.back, strict=True):
            h = h + back(silu(into(norm(h + time))))
        return self.out(self.norm(h))


def diffusion(seed: int, width: float) -> Run:
    torch.manual_seed(seed)
    model, steps = NoisePredictor(wide(96, width)), 300
    draw = Draws(strokes().flatten(1) * 4 - 1.2, 128, seed, 400)

    def of(x: Tensor, generator: torch.Generator) -> Tensor:
        t = torch.rand(len(x), generator=generator)
        noise = torch.randn(x.shape, generator=generator)
        signal = (t * torch.pi / 2).cos()[:, None]
        return mse_loss(model(signal * x + (1 - signal.square()).sqrt() * noise, t), noise)

    def evaluate() -> float:
        """Mean squared error of the noise, at fixed levels and noise."""
        with still(model):
            return of(draw.held_out.repeat(4, 1), seeded(0)).item()

    optimizer = AdamW(decayed(model, 0.01), lr=4e-3, betas=(0.9, 0.99))
    return Run(model, [optimizer], lambda: of(draw(), draw.generator), evaluate, steps, cosine(steps))


RECIPES = (
    Recipe("sparse autoencoder, Adam", sparse_autoencoder, "held out", "dictionary learning: unit decoder, L1, Adam"),
    Recipe("variational autoencoder, Adam", vae, "held out", "conv VAE: Adam 1e-3, no schedule"),
    Recipe("DCGAN, Adam", gan, "held out", "DCGAN: Adam with beta1 0.5, std 0.02, two optimizers"),
    Recipe("diffusion MLP, AdamW", diffusion, "held out", "denoising diffusion: AdamW, 0.01, zero-initialized output"),
)
