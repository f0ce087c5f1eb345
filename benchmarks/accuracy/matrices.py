"""A battery of matrices that a norm estimator may meet, and of some made to defeat it.

Every case is seeded by its own name: it does not depend on the cases before it, and the global generator is left
alone. Trained weights are really trained, for some dozens of steps, when their case is asked for.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NORMAL = 1024
"""Longest side of what is cheap enough for every test run."""


class Case(NamedTuple):
    """One matrix of the battery."""

    name: str
    family: str
    matrix: Tensor


class Spec(NamedTuple):
    """How to make one matrix, or several (``make`` then returns them by name), and their longest side."""

    name: str
    family: str
    longest: int
    make: Callable[[torch.Generator], Tensor | dict[str, Tensor]]

    def cases(self) -> Iterator[Case]:
        """The matrices, made now."""
        made = self.make(torch.Generator().manual_seed(zlib.crc32(self.name.encode())))
        for name, matrix in made.items() if isinstance(made, dict) else [("", made)]:
            yield Case(f"{self.name}{name}", self.family, matrix)


def specs(longest: float = math.inf, longer_than: int = 0) -> list[Spec]:
    """Return the matrices to make, of longest sides above ``longer_than`` and at most ``longest``."""
    families = (_random(), _structured(), _spectra(), _numerics(), _trained())
    return [spec for spec in itertools.chain(*families) if longer_than < spec.longest <= longest]


def cases(longest: float = NORMAL, longer_than: int = 0) -> Iterator[Case]:
    """The matrices themselves, made one by one."""
    return itertools.chain.from_iterable(spec.cases() for spec in specs(longest, longer_than))


def singular_values(A: Tensor) -> Tensor:
    """All singular values, largest first, in float64; those of wide matrices through the Gram matrix."""
    A = A.double()
    if min(A.shape) <= NORMAL:
        return torch.linalg.svdvals(A)
    gram = A @ A.T if A.shape[0] <= A.shape[1] else A.T @ A
    return torch.linalg.eigvalsh(gram).flip(0).clamp(min=0).sqrt()


# --- building blocks


def gaussian(m: int, n: int, g: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    """Independent standard normal entries."""
    return torch.randn(m, n, generator=g, dtype=dtype)


def with_spectrum(m: int, n: int, values: Tensor, g: torch.Generator) -> Tensor:
    """An (m, n) float32 matrix of these singular values and random singular vectors."""
    k = len(values)
    left = torch.linalg.qr(gaussian(m, k, g, torch.float64)).Q
    right = torch.linalg.qr(gaussian(n, k, g, torch.float64)).Q
    return ((left * values.double()) @ right.mT).float()


def spiked(m: int, n: int, above: float, g: torch.Generator) -> Tensor:
    """Gaussian noise plus rank one, its largest singular value the factor ``1 + above`` over the noise's edge."""
    # Baik, Ben Arous, Peche: a spike t on noise of entry variance 1/n moves to sqrt((1 + t^2)(c + t^2))/t, c = m/n.
    c, target = m / n, (1 + above) ** 2 * (1 + math.sqrt(m / n)) ** 2
    half = (target - 1 - c) / 2
    t = math.sqrt(half + math.sqrt(max(half**2 - c, 0.0)))
    u, v = gaussian(m, 1, g), gaussian(1, n, g)
    return gaussian(m, n, g) / math.sqrt(n) + t * (u / u.norm()) @ (v / v.norm())


# --- families


def _random() -> Iterator[Spec]:
    shapes = [(256, 256), (512, 512), (1024, 1024), (100, 1000), (128, 512), (512, 128), (300, 900), (1000, 200)]
    shapes += [(65, 65), (64, 64), (66, 1024), (32, 700)]
    shapes += [(2048, 2048), (4096, 4096), (1024, 4096), (4096, 256), (65, 4000)]
    for m, n in shapes:
        yield Spec(f"gaussian {m}x{n}", "gaussian", max(m, n), lambda g, m=m, n=n: gaussian(m, n, g))
    yield Spec("uniform 512", "gaussian", 512, lambda g: (torch.rand(512, 512, generator=g) - 0.5) / 8)
    yield Spec("positive uniform", "gaussian", 512, lambda g: torch.rand(512, 384, generator=g))
    yield Spec("heavy tails", "gaussian", 700, lambda g: gaussian(700, 500, g) / gaussian(700, 500, g).abs().sqrt())
    yield Spec("cauchy", "gaussian", 500, lambda g: gaussian(500, 500, g) / gaussian(500, 500, g))

    yield Spec("rank 1", "low rank", 500, lambda g: gaussian(300, 1, g) @ gaussian(1, 500, g))
    yield Spec("rank 1, 1024", "low rank", 1024, lambda g: gaussian(1024, 1, g) @ gaussian(1, 1024, g))
    yield Spec("ones", "low rank", 400, lambda g: torch.full((100, 400), 0.1))
    yield Spec("rank 7", "low rank", 600, lambda g: gaussian(600, 7, g) @ gaussian(7, 400, g))
    yield Spec("batch gradient", "low rank", 768, lambda g: gaussian(768, 32, g) @ gaussian(32, 512, g).relu())
    yield Spec("four equal", "low rank", 500, lambda g: with_spectrum(500, 300, torch.ones(4), g))
    for noise in (0.01, 0.1, 1.0):
        yield Spec(
            f"rank 5 + noise {noise}",
            "low rank + noise",
            600,
            lambda g, noise=noise: gaussian(400, 5, g) @ gaussian(5, 600, g) + noise * gaussian(400, 600, g),
        )
    for m, n in [(512, 512), (1024, 1024), (256, 1024), (1000, 100), (2048, 2048), (4096, 4096), (4096, 512)]:
        for above in (0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.3) if max(m, n) < 4096 else (0.02, 0.05):
            yield Spec(
                f"spike {above:.1%} over the edge {m}x{n}",
                "spike over noise",
                max(m, n),
                lambda g, m=m, n=n, above=above: spiked(m, n, above, g),
            )

    yield Spec("signs 512", "signs", 512, lambda g: gaussian(512, 512, g).sign())
    yield Spec("signs 1000x300", "signs", 1000, lambda g: gaussian(1000, 300, g).sign())
    yield Spec("signs 2048", "signs", 2048, lambda g: gaussian(2048, 2048, g).sign())
    yield Spec("signs of rank 1", "signs", 512, lambda g: (gaussian(512, 1, g) @ gaussian(1, 400, g)).sign())
    yield Spec("signs of rank 3", "signs", 512, lambda g: (gaussian(512, 3, g) @ gaussian(3, 512, g)).sign())
    yield Spec("hadamard 512", "signs", 512, lambda g: _hadamard(512))


def _hadamard(n: int) -> Tensor:
    H = torch.ones(1, 1)
    while len(H) < n:
        H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)])
    return H


def _structured() -> Iterator[Spec]:
    def toeplitz(n: int, entry: Callable[[Tensor], Tensor]) -> Tensor:
        i = torch.arange(n, dtype=torch.float64)
        return entry(i[:, None] - i[None, :]).float()

    yield Spec("identity", "structured", 300, lambda g: torch.eye(300))
    yield Spec("identity 1024", "structured", 1024, lambda g: torch.eye(1024))
    yield Spec("zero", "structured", 300, lambda g: torch.zeros(200, 300))
    yield Spec("diagonal", "structured", 400, lambda g: torch.diag(torch.linspace(-1, 1, 400)))
    yield Spec("permutation", "structured", 300, lambda g: torch.eye(300)[torch.randperm(300, generator=g)])
    yield Spec("toeplitz 0.9^|i-j|", "structured", 500, lambda g: toeplitz(500, lambda d: 0.9 ** d.abs()))
    yield Spec("toeplitz 0.5^|i-j|", "structured", 800, lambda g: toeplitz(800, lambda d: 0.5 ** d.abs()))
    yield Spec(
        "second difference", "structured", 600, lambda g: toeplitz(600, lambda d: 2.0 * (d == 0) - 1.0 * (d.abs() == 1))
    )
    yield Spec("shift", "structured", 400, lambda g: toeplitz(400, lambda d: (d == 1).double()))
    yield Spec("triangle of ones", "structured", 500, lambda g: toeplitz(500, lambda d: (d >= 0).double()))
    yield Spec(
        "hilbert", "structured", 400, lambda g: (1 / (torch.arange(400)[:, None] + torch.arange(400) + 1)).float()
    )
    yield Spec("cauchy i-j+1/2", "structured", 500, lambda g: toeplitz(500, lambda d: 1 / (d + 0.5)))
    yield Spec("vandermonde", "structured", 500, lambda g: torch.linspace(-1, 1, 500)[:, None] ** torch.arange(200))
    yield Spec("fourier cosines", "structured", 512, lambda g: _cosines(512))
    yield Spec("circulant", "structured", 500, lambda g: _circulant(gaussian(1, 500, g)[0]))
    yield Spec(
        "sparse 1 %", "sparse", 1000, lambda g: gaussian(1000, 1000, g) * (torch.rand(1000, 1000, generator=g) < 0.01)
    )
    yield Spec(
        "sparse 0.1 %", "sparse", 1000, lambda g: gaussian(1000, 600, g) * (torch.rand(1000, 600, generator=g) < 1e-3)
    )
    yield Spec("one entry", "sparse", 300, lambda g: _placed(torch.ones(1, 1), 300, 200, 123, 45))
    yield Spec("one row", "sparse", 300, lambda g: _placed(gaussian(1, 200, g), 300, 200, 77, 0))
    yield Spec("one column", "sparse", 300, lambda g: _placed(gaussian(300, 1, g), 300, 200, 0, 150))
    yield Spec("embedding gradient", "sparse", 1000, lambda g: _placed(gaussian(40, 128, g), 1000, 128, 500, 0))
    yield Spec(
        "small strong block",
        "sparse",
        600,
        lambda g: _placed(gaussian(8, 8, g), 600, 600, 300, 300) + gaussian(600, 600, g) / 12,
    )
    yield Spec(
        "two blocks", "sparse", 800, lambda g: torch.block_diag(gaussian(400, 400, g), 1.03 * gaussian(400, 400, g))
    )
    yield Spec("row of 1024", "thin", 1024, lambda g: gaussian(1, 1024, g))
    yield Spec("column of 1024", "thin", 1024, lambda g: gaussian(1024, 1, g))
    yield Spec("1x1", "thin", 1, lambda g: gaussian(1, 1, g))
    yield Spec("2x1000", "thin", 1000, lambda g: gaussian(2, 1000, g))
    yield Spec("row of 300000", "thin", 300_000, lambda g: gaussian(1, 300_000, g))
    yield Spec("column of 300000, all 0.1", "thin", 300_000, lambda g: torch.full((300_000, 1), 0.1))
    yield Spec("16x20000", "thin", 20_000, lambda g: gaussian(16, 20_000, g))
    yield Spec("80x20000, all 0.1", "thin", 20_000, lambda g: torch.full((80, 20_000), 0.1))


def _placed(block: Tensor, m: int, n: int, row: int, column: int) -> Tensor:
    A = torch.zeros(m, n)
    A[row : row + block.shape[0], column : column + block.shape[1]] = block
    return A


def _cosines(n: int) -> Tensor:
    i = torch.arange(n, dtype=torch.float64)
    return torch.cos(math.pi * (i[:, None] + 0.5) * i / n).float()


def _circulant(first: Tensor) -> Tensor:
    n = len(first)
    return first[(torch.arange(n)[:, None] - torch.arange(n)) % n]


def _spectra() -> Iterator[Spec]:
    n = 500
    i = torch.arange(n, dtype=torch.float64)
    spectra = {
        "geometric to 1e-3": 1e-3 ** (i / n),
        "geometric to 1e-12": 1e-12 ** (i / n),
        "power -0.05": (i + 1) ** -0.05,
        "power -0.25": (i + 1) ** -0.25,
        "power -1": 1 / (i + 1),
        "power -2": (i + 1) ** -2,
        "linear": 1 - i / n,
        "linear 0.9 to 1": 1 - 0.1 * i / n,
        "parabolic edge": 1 - (i / n) ** 2,
        "half 1, half 1e-6": torch.where(i < n / 2, 1.0, 1e-6),
        "two close": torch.where(i == 0, 1.002, torch.where(i == 1, 1.0, 0.5)),
        "pair over a bulk": torch.where(i < 2, 1.03, 0.98 * (1 - i / n)),
        "staircase": 1 - torch.floor(i / 50) * 0.02,
        "newton-schulz": 0.7 + 0.5 * torch.rand(n, generator=torch.Generator().manual_seed(5)).double(),
    }
    for name, values in spectra.items():
        yield Spec(name, "spectrum", 700, lambda g, values=values: with_spectrum(700, n, values, g))
    for above in (0.012, 0.02, 0.05):
        for top in (1.0, 0.95):
            values = torch.where(i == 0, 1 + above, top * (1 - 0.3 * i / n))
            name = f"bulk to {top}, spike {1 + above}"
            yield Spec(name, "spectrum", 700, lambda g, values=values: with_spectrum(700, n, values, g))
    wide = torch.arange(2048, dtype=torch.float64) / 2048
    yield Spec("geometric to 1e-6, 2048", "spectrum", 2048, lambda g: with_spectrum(2048, 2048, 1e-6**wide, g))
    yield Spec("linear 2048", "spectrum", 2048, lambda g: with_spectrum(2048, 2048, 1 - wide, g))

    def orthogonal(m: int, n: int, g: torch.Generator) -> Tensor:
        return with_spectrum(m, n, torch.ones(min(m, n)), g)

    def orthogonal_spiked(n: int, g: torch.Generator) -> Tensor:
        v = gaussian(n, 1, g)
        v = v / v.norm()
        Q = orthogonal(n, n, g)
        return Q + 0.05 * (Q @ v) @ v.mT

    for m, k in [(512, 512), (1024, 1024), (300, 700), (2048, 2048)]:
        yield Spec(f"orthogonal {m}x{k}", "orthogonal", max(m, k), lambda g, m=m, k=k: orthogonal(m, k, g))
    for k in (300, 512, 1024, 2048):
        yield Spec(f"orthogonal + 5 % spike {k}", "orthogonal", k, lambda g, k=k: orthogonal_spiked(k, g))
    for noise in (0.001, 0.01, 0.03):
        yield Spec(
            f"orthogonal + 5 % spike + noise {noise}",
            "orthogonal",
            512,
            lambda g, noise=noise: orthogonal_spiked(512, g) + noise * gaussian(512, 512, g) / math.sqrt(512),
        )
    yield Spec("reflection", "orthogonal", 500, lambda g: torch.eye(500) - 0.004 * torch.ones(500, 500))


def _numerics() -> Iterator[Spec]:
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        word = str(dtype).removeprefix("torch.")
        yield Spec(f"gaussian {word}", "dtype", 300, lambda g, dtype=dtype: gaussian(200, 300, g).to(dtype))
        yield Spec(
            f"low rank {word}",
            "dtype",
            300,
            lambda g, dtype=dtype: (gaussian(200, 9, g) @ gaussian(9, 300, g)).to(dtype),
        )
        yield Spec(f"thin {word}", "dtype", 300, lambda g, dtype=dtype: gaussian(40, 300, g).to(dtype))
        yield Spec(f"spike {word}", "dtype", 300, lambda g, dtype=dtype: spiked(200, 300, 0.03, g).to(dtype))
    yield Spec("float16 near overflow", "dtype", 300, lambda g: (gaussian(200, 300, g).clamp(-4, 4) * 16000).half())
    yield Spec("float16 subnormal", "dtype", 300, lambda g: (gaussian(200, 300, g) * 1e-6).half())
    yield Spec(
        "float64 geometric",
        "dtype",
        400,
        lambda g: with_spectrum(400, 400, 1e-14 ** torch.linspace(0, 1, 400), g).double(),
    )

    scales = {"1e-25": 1e-25, "1e25": 1e25, "1e-38": 1e-38, "1e-43": 1e-43, "1e36": 1e36, "1e-13": 1e-13, "1e14": 1e14}
    for word, scale in scales.items():
        yield Spec(f"gaussian x {word}", "extreme", 300, lambda g, scale=scale: gaussian(200, 300, g) * scale)
        yield Spec(f"thin x {word}", "extreme", 300, lambda g, scale=scale: gaussian(300, 3, g) * scale)
    for word, scale in {"1e-25": 1e-25, "1e25": 1e25, "1e-300": 1e-300, "1e300": 1e300, "1e-320": 1e-320}.items():
        yield Spec(
            f"float64 x {word}", "extreme", 300, lambda g, scale=scale: gaussian(200, 300, g, torch.float64) * scale
        )
    yield Spec(
        "rows from 1e-18 to 1e18",
        "extreme",
        300,
        lambda g: gaussian(200, 300, g) * torch.logspace(-18, 18, 200)[:, None],
    )
    yield Spec(
        "rows from 1e-6 to 1e6", "extreme", 300, lambda g: gaussian(200, 300, g) * torch.logspace(-6, 6, 200)[:, None]
    )
    yield Spec(
        "one 1e20 among ones",
        "extreme",
        300,
        lambda g: gaussian(200, 300, g) + _placed(torch.full((1, 1), 1e20), 200, 300, 9, 9),
    )
    yield Spec("float64 mean 1e8", "extreme", 300, lambda g: gaussian(200, 300, g, torch.float64) + 1e8)


# --- trained weights


def _trained() -> Iterator[Spec]:
    for optimizer in ("Adam", "SGD"):
        for width in (512, 2048, 4096) if optimizer == "Adam" else (512, 2048):
            name = f"MLP {width} {optimizer}: "
            yield Spec(name, "trained MLP", width, lambda g, w=width, o=optimizer: _train_mlp(w, o, g))
        yield Spec(f"CNN {optimizer}: ", "trained CNN", 128, lambda g, o=optimizer: _train_cnn(o, g))
    yield Spec("transformer AdamW: ", "trained transformer", 512, _train_transformer)


def _digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)


def _train(
    build: Callable[[], nn.Module],
    loss_of: Callable[[nn.Module, Tensor], Tensor],
    samples: int,
    optimizer: str,
    steps: int,
    g: torch.Generator,
) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """(W, dW of the last step, W - W0) of every matrix-like parameter after ``steps`` steps."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**31, (1,), generator=g)))
        model = build()
    rates = {"Adam": 1e-3, "AdamW": 3e-3, "SGD": 0.1}
    step = getattr(torch.optim, optimizer)(model.parameters(), lr=rates[optimizer])
    start = {name: p.detach().clone() for name, p in model.named_parameters() if p.ndim > 1}
    before = start
    for i in range(steps):
        if i == steps - 1:
            before = {name: p.detach().clone() for name, p in model.named_parameters() if p.ndim > 1}
        loss = loss_of(model, torch.randint(samples, (64,), generator=g))
        step.zero_grad()
        loss.backward()
        step.step()
    now = {name: p.detach() for name, p in model.named_parameters() if p.ndim > 1}
    return {name: (W, W - before[name], W - start[name]) for name, W in now.items()}


def _named(weights: dict[str, tuple[Tensor, Tensor, Tensor]]) -> dict[str, Tensor]:
    kinds = ("W", "dW", "W - W0")
    return {f"{name} {kind}": A for name, trio in weights.items() for kind, A in zip(kinds, trio, strict=True)}


def _train_mlp(width: int, optimizer: str, g: torch.Generator) -> dict[str, Tensor]:
    pixels, labels = _digits()

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))

    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        return F.cross_entropy(model(pixels[rows]), labels[rows])

    named = _named(_train(build, loss, len(pixels), optimizer, 48 if width < 2048 else 24, g))
    return named if width < 2048 else {name: A for name, A in named.items() if name.startswith("2")}


def _train_cnn(optimizer: str, g: torch.Generator) -> dict[str, Tensor]:
    pixels, labels = _digits()

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 96, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(96, 128, 3, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(128 * 9, 10),
        )

    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        return F.cross_entropy(model(pixels[rows].reshape(-1, 1, 8, 8)), labels[rows])

    weights = _named(_train(build, loss, len(pixels), optimizer, 32, g))
    taps = {
        f"{name} tap {y}{x}": A[:, :, y, x]
        for name, A in weights.items()
        if name.startswith("2")
        for y, x in ((0, 0), (1, 1), (2, 1))
    }
    return taps | {name: A[:, 0, 1, 1:] for name, A in weights.items() if name.startswith("0")}


class _Block(nn.Module):
    """A pre-norm causal transformer block."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(d), nn.LayerNorm(d)])
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        N, T, d = x.shape
        q, k, v = self.qkv(self.norms[0](x)).reshape(N, T, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(N, T, d))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def _train_transformer(g: torch.Generator) -> dict[str, Tensor]:
    pixels = (_digits()[0] * 16).long()  # the next of 64 pixels, each a token of 17

    def build() -> nn.Module:
        d = 128
        return nn.Sequential(nn.Embedding(17, d), _Block(d, 4), _Block(d, 4), nn.LayerNorm(d), nn.Linear(d, 17))

    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        return F.cross_entropy(model(pixels[rows, :-1]).flatten(0, 1), pixels[rows, 1:].flatten())

    return _named(_train(build, loss, len(pixels), "AdamW", 24, g))
