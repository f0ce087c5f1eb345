"""Networks written for the zoo: what people train that is not in transformers."""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.optim import Optimizer

from tests.zoo.case import Batch, Case

SAMPLES, TOKENS, LENGTH, CLASSES = 4, 99, 12, 5


def labelled(generator: Generator) -> Batch:
    x = torch.randn(SAMPLES, 3, 16, 16, generator=generator)
    return {"x": x, "y": torch.randint(CLASSES, (SAMPLES,), generator=generator)}


def text(generator: Generator) -> Batch:
    ids = torch.randint(TOKENS, (SAMPLES, LENGTH + 1), generator=generator)
    return {"x": ids[:, :-1], "y": ids[:, 1:]}


def pictures(generator: Generator) -> Batch:
    return {"x": torch.randn(SAMPLES, 1, 16, 16, generator=generator)}


def entropy(model: nn.Module, batch: Batch) -> Tensor:
    """The loss is formed outside the model, from logits with the classes last."""
    return functional.cross_entropy(model(batch["x"]).flatten(0, -2), batch["y"].flatten())


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1, bias=False),
        nn.BatchNorm2d(24),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Dropout2d(0.2),
        nn.Conv2d(24, 72, 3, stride=2, groups=2),
        nn.BatchNorm2d(72),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(648, 80),
        nn.ReLU(),
        nn.Linear(80, CLASSES),
    )


class UNet(nn.Module):
    """A denoiser: depthwise convolutions, a time embedding, down and up again with a skip; draws noise and time."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(width, 96), nn.SiLU(), nn.Linear(96, 2 * width))
        self.enter = nn.Conv2d(1, width, 3, padding=1)
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.GroupNorm(4, width)
        self.down = nn.Conv2d(width, 2 * width, 4, stride=2, padding=1)
        self.middle = nn.Conv2d(2 * width, 2 * width, 1)
        self.drop = nn.Dropout(0.1)
        self.up = nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1)
        self.leave = nn.Conv2d(2 * width, 1, 3, padding=1)
        self.register_buffer("frequencies", torch.exp(-torch.linspace(0, 4, width // 2)))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        t, noise = torch.rand(len(x), 1), torch.randn_like(x)
        angles = 1000 * t * self.frequencies
        shift = self.time(torch.cat([angles.sin(), angles.cos()], 1))[:, :, None, None]
        high = functional.silu(self.norm(self.depthwise(self.enter(x + t[:, :, None, None] * noise))))
        low = functional.silu(self.middle(self.drop(self.down(high) + shift)))
        return {"loss": functional.mse_loss(self.leave(torch.cat([self.up(low), high], 1)), noise)}


class Recurrent(nn.Module):
    """A language model that carries its state from batch to batch."""

    def __init__(self, kind: type[nn.RNNBase], tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, 72)
        self.core = kind(72, 72, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(72, TOKENS, bias=not tied)
        if tied:
            self.head.weight = self.tokens.weight
        self.state = None

    def forward(self, x: Tensor) -> Tensor:
        h, state = self.core(self.tokens(x), self.state)
        self.state = tuple(s.detach() for s in state) if isinstance(state, tuple) else state.detach()
        return self.head(h)


class Adversaries(nn.Module):
    """A generator and a discriminator, each with an optimizer; the discriminator's norms are held at 1."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(16, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Linear(96, 256), nn.Tanh())
        self.judge = nn.Sequential(
            nn.Flatten(),
            nn.Linear(256, 80),
            nn.LeakyReLU(0.2),
            spectral_norm(nn.Linear(80, 72)),
            nn.ReLU(),
            nn.Linear(72, 1),
        )


def adversaries_optimizers(model: nn.Module) -> list[Optimizer]:
    return [torch.optim.Adam(part.parameters(), lr=1e-3, betas=(0.5, 0.9)) for part in (model.judge, model.maker)]


def compete(case: Case, model: nn.Module, optimizers: list[Optimizer], batch: Batch) -> list[float]:
    """The discriminator's step, then the generator's."""
    judge, maker = optimizers
    fake = model.maker(torch.randn(len(batch["x"]), 16))
    judge.zero_grad()
    judged = (
        functional.softplus(-model.judge(batch["x"])).mean() + functional.softplus(model.judge(fake.detach())).mean()
    )
    judged.backward()
    judge.step()
    maker.zero_grad()
    made = functional.softplus(-model.judge(fake)).mean()
    made.backward()
    maker.step()
    return [float(judged.detach()), float(made.detach())]


class Autoencoder(nn.Module):
    """Variational: draws the code, returns the loss as a tuple with the reconstruction."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(256, 96), nn.Tanh())
        self.mean, self.log_variance = nn.Linear(96, 8), nn.Linear(96, 8)
        self.decoder = nn.Sequential(nn.Linear(8, 96), nn.Tanh(), nn.Linear(96, 256))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.encoder(x)
        mean, log_variance = self.mean(h), self.log_variance(h)
        code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).sum(1)
        error = (self.decoder(code) - x.flatten(1)).square().sum(1)
        return {"loss": (error + divergence).mean()}


class Mixer(nn.Module):
    """Mixes over patches, which are not the last dimension, and over channels; dropout in between."""

    def __init__(self, width: int = 72, patches: int = 16) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, stride=4)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.mixers = nn.ModuleList(self.mlp(size, 96) for _ in range(2) for size in (patches, width))
        self.head = nn.Linear(width, CLASSES)

    @staticmethod
    def mlp(size: int, hidden: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(size, hidden), nn.GELU(), nn.Dropout(0.1), nn.Linear(hidden, size))

    def forward(self, x: Tensor) -> Tensor:
        h = self.patch(x).flatten(2).mT
        for i, (norm, mixer) in enumerate(zip(self.norms, self.mixers, strict=True)):
            h = h + (mixer(norm(h).mT).mT if i % 2 == 0 else mixer(norm(h)))
        return self.head(h.mean(1))


class Attentive(nn.Module):
    """torch's own transformer, with positions as a bare parameter."""

    def __init__(self, width: int = 72) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, width)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        layer = nn.TransformerEncoderLayer(width, 4, 96, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.encoder(self.tokens(x) + self.positions, mask=mask, is_causal=True))


class Graph(nn.Module):
    """Graph convolutions with matrices of their own, written (in, out) and applied by hand."""

    def __init__(self, width: int = 72) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(16, width) / 4)
        self.second = nn.Parameter(torch.randn(width, width) / math.sqrt(width))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor, links: Tensor) -> Tensor:
        h = torch.relu(links @ x @ self.first)
        h = functional.dropout(h, 0.2, self.training)
        return self.head(torch.relu(links @ h @ self.second))


def graphs(generator: Generator) -> Batch:
    links = (torch.rand(30, 30, generator=generator) < 0.2).float() + torch.eye(30)
    x = torch.randn(30, 16, generator=generator)
    return {"x": x, "links": links / links.sum(1, True), "y": torch.randint(CLASSES, (30,), generator=generator)}


def graph_loss(model: nn.Module, batch: Batch) -> Tensor:
    return functional.cross_entropy(model(batch["x"], batch["links"]), batch["y"])


class Recommender(nn.Module):
    """Bags of sparse embeddings and dense features, as click prediction has them."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(200, 72, sparse=True)
        self.users = nn.Embedding(50, 72, sparse=True)
        self.dense = nn.Linear(6, 72)
        self.top = nn.Sequential(nn.Linear(72 * 3, 96), nn.ReLU(), nn.Dropout(0.1), nn.Linear(96, 1))

    def forward(self, bags: Tensor, users: Tensor, x: Tensor) -> Tensor:
        return self.top(torch.cat([self.items(bags), self.users(users), self.dense(x)], 1))[:, 0]


def clicks(generator: Generator) -> Batch:
    return {
        "bags": torch.randint(200, (16, 5), generator=generator),
        "users": torch.randint(50, (16,), generator=generator),
        "x": torch.randn(16, 6, generator=generator),
        "y": torch.randint(2, (16,), generator=generator).float(),
    }


def click_loss(model: nn.Module, batch: Batch) -> Tensor:
    return functional.binary_cross_entropy_with_logits(model(batch["bags"], batch["users"], batch["x"]), batch["y"])


def sgd(model: nn.Module) -> list[Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.05)]


class Causal(nn.Module):
    """WaveNet-like: dilated convolutions under weight norm, gated, with skips."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.enter = nn.Conv1d(1, width, 1)
        self.dilated = nn.ModuleList(weight_norm(nn.Conv1d(width, 2 * width, 2, dilation=2**i)) for i in range(3))
        self.out = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(3))
        self.leave = nn.Conv1d(width, 1, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        wave = x.flatten(1)[:, None, :128]
        h = self.enter(wave[:, :, :-1])
        for i, (dilated, out) in enumerate(zip(self.dilated, self.out, strict=True)):
            left, right = dilated(functional.pad(h, (2**i, 0))).chunk(2, 1)
            h = h + out(left.tanh() * right.sigmoid())
        return {"loss": functional.mse_loss(self.leave(h), wave[:, :, 1:])}


FAMILY = "written out"
WRITTEN = [
    Case("convolutional, BatchNorm", FAMILY, convolutional, labelled, entropy),
    Case("U-Net with time embedding", FAMILY, UNet, pictures),
    Case("LSTM language model", FAMILY, lambda: Recurrent(nn.LSTM, tied=False), text, entropy),
    Case("LSTM, tied", FAMILY, lambda: Recurrent(nn.LSTM, tied=True), text, entropy),
    Case("GRU language model", FAMILY, lambda: Recurrent(nn.GRU, tied=False), text, entropy),
    Case(
        "GAN, spectral norm",
        FAMILY,
        Adversaries,
        pictures,
        optimizers=adversaries_optimizers,
        step=compete,
        whole=False,
    ),
    Case("variational autoencoder", FAMILY, Autoencoder, pictures),
    Case("MLP-Mixer", FAMILY, Mixer, labelled, entropy),
    Case("nn.TransformerEncoder", FAMILY, Attentive, text, entropy),
    Case("graph convolutions", FAMILY, Graph, graphs, graph_loss),
    Case("recommender, sparse gradients", FAMILY, Recommender, clicks, click_loss, optimizers=sgd),
    Case("WaveNet, weight norm", FAMILY, Causal, pictures),
]
