"""Networks whose shapes are awkward to shard, and one module that trains any of them.

Every network says how it may be cut: ``parts`` (for FSDP) and ``plan`` (for tensor parallelism); and makes the whole
batch of a step from a seed, of which every process trains on its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn import functional as nnf
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

Batch = tuple[Tensor, ...]

SIZE = 40
"""Samples of a whole batch: of the transformer more rows than alignments are measured on."""


def columns() -> ColwiseParallel:
    """Outputs cut while they are computed, and put together again: rows need not divide by the processes."""
    return ColwiseParallel(output_layouts=Replicate())


def rows() -> RowwiseParallel:
    """For a layer whose inputs are not cut yet."""
    return RowwiseParallel(input_layouts=Replicate())


class Perceptron(nn.Module):
    """37 rows do not divide by 2 or 4; 3 rows leave one of 4 processes with none; short sides around 64."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(96, 160), nn.Linear(160, 128)
        self.odd, self.wide = nn.Linear(128, 37), nn.Linear(37, 96, bias=False)
        self.dropout, self.readout = nn.Dropout(dropout), nn.Linear(96, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(self.up(x).relu()).relu()
        return self.readout(self.dropout(self.wide(self.odd(x).tanh()).relu()))

    def parts(self) -> list[nn.Module]:
        return [self.up, self.odd]

    def plan(self) -> dict[str, ParallelStyle]:
        """The readout stays whole: SGD with momentum fails in torch on a cut that leaves a process with no rows."""
        return {"up": ColwiseParallel(), "down": RowwiseParallel(), "odd": columns()}

    @staticmethod
    def batch(size: int, generator: torch.Generator) -> Batch:
        return torch.randn(size, 96, generator=generator), torch.randint(3, (size,), generator=generator)


class Deep(nn.Module):
    """As many layers of one shape as one likes; ``alike`` begin with the same weights; ``again``: each is called once
    more in the backward pass, in a backward pass of its own.
    """

    def __init__(self, depth: int, alike: bool = False, again: bool = False) -> None:
        super().__init__()
        self.again = again
        self.layers = nn.ModuleList([nn.Linear(128, 128) for _ in range(depth - 1)])
        self.readout = nn.Linear(128, 3)
        if alike:
            for layer in self.layers:
                layer.load_state_dict(self.layers[0].state_dict())

    def forward(self, x: Tensor) -> Tensor:
        x.requires_grad_(self.again)
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=True) if self.again else layer(x)).tanh()
        return self.readout(x)

    def parts(self) -> list[nn.Module]:
        return list(self.layers)

    def plan(self) -> dict[str, ParallelStyle]:
        return {f"layers.{i}": columns() for i in range(len(self.layers))}

    @staticmethod
    def batch(size: int, generator: torch.Generator) -> Batch:
        return torch.randn(size, 128, generator=generator), torch.randint(3, (size,), generator=generator)


class Block(nn.Module):
    """Attention over fused queries, keys and values, then a perceptron."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2, self.dropout = nn.LayerNorm(width), nn.LayerNorm(width), nn.Dropout(dropout)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = nnf.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + self.dropout(self.proj(attended))
        return x + self.dropout(self.down(nnf.gelu(self.up(self.norm2(x)))))


class Transformer(nn.Module):
    """Returns the loss, as nanoGPT does, so that what the step did to it can be seen."""

    VOCABULARY, LENGTH, WIDTH = 50, 8, 72

    def __init__(self, tied: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.tied = tied
        self.tokens, self.places = nn.Embedding(self.VOCABULARY, self.WIDTH), nn.Embedding(self.LENGTH, self.WIDTH)
        self.blocks = nn.ModuleList([Block(self.WIDTH, 4, dropout) for _ in range(2)])
        self.norm, self.readout = nn.LayerNorm(self.WIDTH), nn.Linear(self.WIDTH, self.VOCABULARY, bias=False)
        if tied:
            self.readout.weight = self.tokens.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return nnf.cross_entropy(self.readout(self.norm(x)).flatten(0, 1).float(), targets.flatten())

    def parts(self) -> list[nn.Module]:
        return list(self.blocks)

    def plan(self) -> dict[str, ParallelStyle]:
        """Queries, keys and values stay whole: cut in two, the first half of the rows is not half of the heads."""
        plan: dict[str, ParallelStyle] = {}
        for i in range(len(self.blocks)):
            plan |= {f"blocks.{i}.proj": rows(), f"blocks.{i}.up": ColwiseParallel()}
            plan |= {f"blocks.{i}.down": RowwiseParallel()}
        return plan if self.tied else plan | {"tokens": rows(), "readout": columns()}

    @classmethod
    def batch(cls, size: int, generator: torch.Generator) -> Batch:
        ids = torch.randint(cls.VOCABULARY, (size, cls.LENGTH + 1), generator=generator)
        return ids[:, :-1], ids[:, 1:]


class Experts(nn.Module):
    """Every token to one expert, weighed by a gate; an expert without tokens is called with none, or not at all."""

    def __init__(self, width: int, count: int, empty: bool) -> None:
        super().__init__()
        self.empty = empty
        self.gate = nn.Linear(width, count)
        self.experts = nn.ModuleList([nn.Linear(width, width) for _ in range(count)])

    def forward(self, x: Tensor, route: Tensor) -> Tensor:
        weight = self.gate(x).softmax(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts[:-1]):  # the last one is never chosen
            chosen = (route == i).nonzero().squeeze(1)
            if len(chosen) or self.empty:
                out = out.index_add(0, chosen, expert(x[chosen]).tanh() * weight[chosen, i : i + 1])
        return x + out


class Mixture(nn.Module):
    """Expert 0 has tokens everywhere, 1 in the first half of the batch only, 2 in the second, 3 nowhere."""

    def __init__(self, empty: bool = False) -> None:
        super().__init__()
        self.first, self.mixture, self.readout = nn.Linear(40, 96), Experts(96, 4, empty), nn.Linear(96, 5)

    def forward(self, x: Tensor, route: Tensor) -> Tensor:
        return self.readout(self.mixture(self.first(x).relu(), route))

    def parts(self) -> list[nn.Module]:
        return [self.mixture]

    def plan(self) -> dict[str, ParallelStyle]:
        return {"first": columns(), **{f"mixture.experts.{i}": columns() for i in range(4)}, "readout": columns()}

    @staticmethod
    def batch(size: int, generator: torch.Generator) -> Batch:
        half = 1 + (torch.arange(size) >= size // 2).long()
        route = torch.where(torch.arange(size) % 3 == 0, half, 0)
        x = torch.randn(size, 40, generator=generator)
        return x, route, torch.randint(5, (size,), generator=generator)


class Normalized(nn.Module):
    """Convolutions with BatchNorm, whose buffers DDP sends from the first process before every forward."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)
        self.second, self.norm2 = nn.Conv2d(16, 8, 3), nn.BatchNorm2d(8)
        self.dropout, self.readout = nn.Dropout(dropout), nn.Linear(8 * 4 * 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm2(self.second(self.norm1(self.first(x)).relu())).relu()
        return self.readout(self.dropout(x.flatten(1)))

    @staticmethod
    def batch(size: int, generator: torch.Generator) -> Batch:
        return torch.randn(size, 3, 8, 8, generator=generator), torch.randint(3, (size,), generator=generator)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": Perceptron,
    "perceptron, dropout": lambda: Perceptron(dropout=0.2),
    "transformer": Transformer,
    "transformer, tied": lambda: Transformer(tied=True),
    "transformer, dropout": lambda: Transformer(dropout=0.2),
    "mixture": Mixture,
    "mixture, empty calls": lambda: Mixture(empty=True),
    "normalized": Normalized,
    "deep 4": lambda: Deep(4),
    "deep 40": lambda: Deep(40),
    "deep 4, checkpoints": lambda: Deep(4, again=True),
    "alike 4": lambda: Deep(4, alike=True),
    "alike 40": lambda: Deep(40, alike=True),
}
OPTIMIZERS: dict[str, Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.003, foreach=False),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, foreach=False),
}


class Training(pl.LightningModule):
    """Trains a network by name; the same initial weights on every process.

    ``shard`` cuts the network in place, when a strategy that leaves that to the module asks for it.
    """

    def __init__(self, name: str, optimizer: str = "sgd", shard: Callable[[Training], None] | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = NETWORKS[name]()
        self._optimizer, self._shard = optimizer, shard

    def configure_model(self) -> None:
        if self._shard is not None:
            self._shard(self)
            self._shard = None

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if isinstance(self.net, Transformer):
            loss = self.net(*batch)
        else:
            loss = nnf.cross_entropy(self.net(*batch[:-1]).float(), batch[-1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self._optimizer](self.parameters())


def batches(name: str, steps: int, part: int = 0, parts: int = 1, size: int = SIZE) -> DataLoader[Batch]:
    """Rows of one process, of ``parts``, of the whole batch of every step."""
    kind = type(NETWORKS[name]())
    whole = [kind.batch(size, torch.Generator().manual_seed(100 + step)) for step in range(steps)]
    return DataLoader([tuple(t.chunk(parts)[part].clone() for t in batch) for batch in whole], batch_size=None)
