"""Train a small transformer on several processes and watch every layer, whoever holds which part of it.

    python examples/distributed.py                                               # one process
    torchrun --nproc-per-node 2 examples/distributed.py --strategy ddp           # copies, each with a batch of its own
    torchrun --nproc-per-node 2 examples/distributed.py --strategy fsdp2         # every matrix sharded over all
    torchrun --nproc-per-node 4 examples/distributed.py --strategy hsdp          # sharded over two, copied to the rest
    torchrun --nproc-per-node 4 examples/distributed.py --strategy tp            # one batch, every layer cut in four

It ends with a table of all layers and the command that opens TensorBoard. Works unchanged on GPUs, one process each.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import warnings
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from spectral_monitor import SpectralMonitor

RANK, PROCESSES = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # as torchrun sets them
DEPTH, HEADS, CONTEXT = 3, 4, 64
LICENSE = Path(__file__).parents[1] / "LICENSE"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.proj = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = width // HEADS

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (self.heads(layer(h)) for layer in (self.query, self.key, self.value))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def heads(self, x: Tensor) -> Tensor:
        """As many as are here: under tensor parallelism each process has some of them."""
        return x.unflatten(-1, (-1, self.head)).transpose(1, 2)


class Transformer(nn.Module):
    """Returns the loss, so that the monitor can say by how much a step lowered it."""

    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(DEPTH)))
        self.norm, self.readout = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.blocks(self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device)))
        return F.cross_entropy(self.readout(self.norm(x)).flatten(0, 1), targets.flatten())


class Characters(L.LightningModule):
    """Says which character comes next."""

    def __init__(self, strategy: str, vocab: int, width: int) -> None:
        super().__init__()
        self.strategy, self.sizes, self.net = strategy, (vocab, width), None

    def configure_model(self) -> None:
        """Build the network and give every process its part: the monitor finds out by itself which that is."""
        if self.net is not None:
            return
        self.net = Transformer(*self.sizes)
        if self.strategy == "fsdp2":
            shard(self.net, self.device_mesh["data_parallel"])
        elif self.strategy == "hsdp":
            kind = self.device_mesh.device_type
            shard(self.net, init_device_mesh(kind, (PROCESSES // 2, 2), mesh_dim_names=("copies", "parts")))
        elif self.strategy == "tp":
            cut(self.net, self.device_mesh["tensor_parallel"])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0][:, :-1], batch[0][:, 1:])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Where some parameters are cut and others whole, torch can only step them one by one.
        return torch.optim.AdamW(self.parameters(), lr=1e-3, foreach=self.strategy != "tp")


def shard(net: Transformer, mesh: DeviceMesh) -> None:
    """FSDP2: block by block, then what is left."""
    for part in (*net.blocks, net):
        fully_shard(part, mesh=mesh)


def cut(net: Transformer, mesh: DeviceMesh) -> None:
    """Tensor parallelism: the first layer of each pair by outputs, the second by inputs."""
    by_outputs = dict.fromkeys(("query", "key", "value", "up"), ColwiseParallel())
    for block in net.blocks:
        parallelize_module(block, mesh, {**by_outputs, "proj": RowwiseParallel(), "down": RowwiseParallel()})
    parallelize_module(net, mesh, {"readout": ColwiseParallel(output_layouts=Replicate())})


def windows(text: str) -> tuple[TensorDataset, int]:
    """All windows of a text, each with the character that follows it, and the number of different characters."""
    letters = {c: i for i, c in enumerate(sorted(set(text)))}
    return TensorDataset(torch.tensor([letters[c] for c in text]).unfold(0, CONTEXT + 1, 1)), len(letters)


def refuse(strategy: str) -> str:
    """Why so many processes cannot train this way; empty if they can."""
    if strategy == "hsdp" and (PROCESSES < 4 or PROCESSES % 2):
        return f"--strategy hsdp needs an even number of processes, 4 or more, not {PROCESSES}; torchrun starts them"
    if strategy in ("fsdp2", "tp") and PROCESSES < 2:
        return f"--strategy {strategy} needs 2 processes or more; torchrun starts them"
    if strategy == "tp" and HEADS % PROCESSES:
        return f"--strategy tp shares out {HEADS} heads, which do not divide by {PROCESSES} processes"
    return ""


def command(name: str) -> str:
    """How a program of this environment is called from here: by its path, unless the shell finds it or that is long."""
    path = Path(os.path.relpath(sys.executable)).with_name(name)
    return name if shutil.which(name) or path.parts[:2] == ("..", "..") else str(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=("ddp", "fsdp2", "tp", "hsdp"), default="ddp", help="default: ddp")
    parser.add_argument("--data", type=Path, default=LICENSE, help="text to train on; default: this project's licence")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps; default: 60")
    parser.add_argument("--every", type=int, default=10, help="measure every n-th step; default: 10")
    parser.add_argument("--width", type=int, default=128, help="default: 128")
    parser.add_argument("--logdir", default="runs", help="where TensorBoard files go; default: runs")
    args = parser.parse_args()
    if reason := refuse(args.strategy):
        sys.exit(reason if RANK == 0 else 0)  # said once
    warnings.filterwarnings("ignore", module="lightning")
    L.seed_everything(0, verbose=False)

    data, vocab = windows(args.data.read_text())
    sharing = PROCESSES if args.strategy == "tp" else 1  # processes that get the same batch
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    monitor = SpectralMonitor(every_n_steps=args.every)  # the same as in one process
    trainer = L.Trainer(
        strategy="auto" if args.strategy == "ddp" else ModelParallelStrategy(PROCESSES // sharing, sharing),
        accelerator="cuda" if torch.cuda.is_available() else "cpu",
        devices=here,
        num_nodes=PROCESSES // here,
        max_steps=args.steps,
        callbacks=[monitor],
        logger=TensorBoardLogger(args.logdir, name=f"distributed-{args.strategy}"),
        log_every_n_steps=5,
        enable_checkpointing=False,
    )
    trainer.fit(Characters(args.strategy, vocab, args.width), DataLoader(data, 16, shuffle=True, drop_last=True))
    if trainer.is_global_zero and monitor.latest is not None:
        print(f"\nSee it:  {command('tensorboard')} --logdir {args.logdir}")


if __name__ == "__main__":
    main()
