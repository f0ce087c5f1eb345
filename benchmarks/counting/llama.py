"""Transformers in the shape of Llama, dense or with a mixture of experts, from the numbers of their configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn import functional as F


@dataclass(frozen=True)
class Config:
    """Attributes.

    Attributes:
        width, hidden, depth, heads, kv_heads, vocabulary: as in the configuration of a checkpoint.
        experts: in every other block, from the second one; 0 for none.
        expert_hidden: their hidden width.
    """

    width: int
    hidden: int
    depth: int
    heads: int
    kv_heads: int
    vocabulary: int
    experts: int = 0
    expert_hidden: int = 0


CONFIGS = {
    "Llama 7B": Config(4096, 11008, 32, 32, 32, 32000),
    "Llama 70B": Config(8192, 28672, 80, 64, 8, 128256),
    # As Llama 4 Maverick: 128 experts and a shared one, in every other block.
    "mixture 400B": Config(5120, 16384, 48, 40, 8, 202048, 128, 8192),
}
TINY = Config(96, 160, 2, 4, 2, 120)


class Experts(nn.Module):
    """Every expert is given as many tokens as every other: which ones is a matter of values, how many of shapes."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        count, d, hidden = config.experts, config.width, config.expert_hidden
        self.gate_up_proj = nn.Parameter(torch.randn(count, d, 2 * hidden) / d**0.5)
        self.down_proj = nn.Parameter(torch.randn(count, hidden, d) / hidden**0.5)

    def forward(self, x: Tensor) -> Tensor:
        dealt = x.reshape(len(self.gate_up_proj), -1, x.shape[-1])
        gate, up = torch.bmm(dealt, self.gate_up_proj).chunk(2, -1)
        return torch.bmm(F.silu(gate) * up, self.down_proj).reshape(x.shape)


class Block(nn.Module):
    def __init__(self, config: Config, mixed: bool) -> None:
        super().__init__()
        d, self.head = config.width, config.width // config.heads
        hidden = config.expert_hidden if mixed else config.hidden
        kv = config.kv_heads * self.head
        self.norm1, self.norm2 = nn.RMSNorm(d), nn.RMSNorm(d)
        self.q, self.k, self.v = (nn.Linear(d, size, bias=False) for size in (d, kv, kv))
        self.o = nn.Linear(d, d, bias=False)
        self.gate, self.up = nn.Linear(d, hidden, bias=False), nn.Linear(d, hidden, bias=False)
        self.down = nn.Linear(hidden, d, bias=False)
        if mixed:
            self.router, self.experts = nn.Linear(d, config.experts, bias=False), Experts(config)
        self.mixed = mixed

    def forward(self, x: Tensor) -> Tensor:
        """Rotations of positions are left out: they have no parameters."""
        normed = self.norm1(x)
        q, k, v = (part(normed).unflatten(-1, (-1, self.head)).transpose(1, 2) for part in (self.q, self.k, self.v))
        times = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(times, 1) if times > 1 else t for t in (k, v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        normed = self.norm2(x)
        out = self.down(F.silu(self.gate(normed)) * self.up(normed))
        if self.mixed:
            out = out + self.experts(normed) * self.router(normed).sigmoid().amax(-1, keepdim=True)
        return x + out


class Llama(nn.Module):
    """Returns the loss."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList([Block(config, bool(config.experts) and k % 2 == 1) for k in range(config.depth)])
        self.norm, self.head = nn.RMSNorm(config.width), nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())

    def matrices(self) -> Iterator[nn.Parameter]:
        return (p for p in self.parameters() if p.ndim > 1)


def split(model: Llama, mesh: DeviceMesh) -> None:
    """Tensor parallelism as usual: columns, then rows; mixtures are not cut so here."""
    plan: dict[str, ParallelStyle] = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    for k in range(len(model.blocks)):
        plan |= {f"blocks.{k}.{name}": ColwiseParallel() for name in ("q", "k", "v", "gate", "up")}
        plan |= {f"blocks.{k}.{name}": RowwiseParallel() for name in ("o", "down")}
    parallelize_module(model, mesh, plan)


def shard(model: Llama, mesh: DeviceMesh) -> None:
    """FSDP2 of every block and of what is left; HSDP on a mesh of two dimensions. Experts are cut in their inputs."""

    def placement(p: nn.Parameter) -> Shard:
        return Shard(1 if p.ndim == 3 else 0)

    for block in model.blocks:
        fully_shard(block, mesh=mesh, shard_placement_fn=placement)
    fully_shard(model, mesh=mesh)
