"""A loop like torchtitan's with the probe around its steps: FSDP2 over a device mesh, tensor parallelism, checkpoints.

torchrun --nproc-per-node 2 examples/torchtitan_loop.py                      # every matrix sharded over both
torchrun --nproc-per-node 4 examples/torchtitan_loop.py --tp 2               # each layer cut in two, then sharded
torchrun --nproc-per-node 2 examples/torchtitan_loop.py --resume --steps 80  # goes on from the checkpoint in --out
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from spectral_monitor import SpectralProbe
from spectral_monitor.reporting import JSONLinesSink

RANK, PROCESSES = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # as torchrun sets them
TEXT = (Path(__file__).parents[1] / "LICENSE").read_text()
CONTEXT, BATCH, HEADS, LAYERS = 32, 8, 4, 2


class TransformerBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.w1, self.w3 = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * width, width, bias=False)
        self.head = width // HEADS

    def forward(self, x: Tensor) -> Tensor:
        h = self.attention_norm(x)
        # As many heads as are here: under tensor parallelism each process has some of them.
        q, k, v = (w(h).unflatten(-1, (-1, self.head)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(attended.transpose(1, 2).flatten(-2))
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Transformer(nn.Module):
    """Returns the loss, so that the probe can say by how much a step lowered it."""

    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.tok_embeddings, self.positions = nn.Embedding(vocab, width), nn.Embedding(CONTEXT, width)
        self.layers = nn.ModuleList(TransformerBlock(width) for _ in range(LAYERS))
        self.norm, self.output = nn.RMSNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tok_embeddings(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.output(self.norm(x)).flatten(0, 1), targets.flatten())


def parallelize(model: Transformer, mesh: DeviceMesh) -> None:
    """Tensor parallelism inside, FSDP2 outside: block by block, then what is left."""
    if mesh["tp"].size() > 1:
        by_outputs = dict.fromkeys(("wq", "wk", "wv", "w1", "w3"), ColwiseParallel())
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], {**by_outputs, "wo": RowwiseParallel(), "w2": RowwiseParallel()})
        parallelize_module(model, mesh["tp"], {"output": ColwiseParallel(output_layouts=Replicate())})
    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh["dp"])


def clip(model: nn.Module, largest: float) -> None:
    """Clip the norm of all gradients together; those on different meshes are added up one by one."""
    meshes: dict[Any, list[Tensor]] = defaultdict(list)
    for p in model.parameters():
        if isinstance(p.grad, DTensor):
            meshes[p.grad.device_mesh].append(p)
    norms = [nn.utils.get_total_norm([p.grad for p in some]).full_tensor() for some in meshes.values()]
    total = torch.stack(norms).norm()
    for some in meshes.values():
        for p in some:
            p.grad.mul_(min(1.0, largest / (total.item() + 1e-6)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1, help="processes that share each layer; default: 1")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps; default: 40")
    parser.add_argument("--every", type=int, default=10, help="measure every n-th step; default: 10")
    parser.add_argument("--width", type=int, default=64, help="default: 64")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--out", type=Path, default=Path("runs/torchtitan"), help="default: %(default)s")
    args = parser.parse_args()
    if PROCESSES < 2 or PROCESSES % args.tp or HEADS % args.tp:
        told = f"--tp {args.tp} must divide {HEADS} heads and the number of processes, which is {PROCESSES}"
        sys.exit((told if PROCESSES > 1 else "start it on 2 processes or more, with torchrun") if RANK == 0 else 0)

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(kind, (PROCESSES // args.tp, args.tp), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    letters = {c: i for i, c in enumerate(sorted(set(TEXT)))}
    data = torch.tensor([letters[c] for c in TEXT])
    model: Any = Transformer(len(letters), args.width).to(kind)
    parallelize(model, mesh)
    # Where parameters lie on different meshes, torch can only step them one by one.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=args.tp == 1)

    # The probe: once the model is sharded, in all processes; which batch is this process's, the mesh says.
    args.out.mkdir(parents=True, exist_ok=True)
    sink = JSONLinesSink(args.out / "spectral_monitor.jsonl", {"model": "Transformer"})
    part = mesh["dp"].get_local_rank()
    probe = SpectralProbe(model, optimizer, every_n_steps=args.every, sinks=[sink], data_parallel_rank=part)
    first, parted = 0, args.out / f"probe-{RANK}.pt"  # each process has its part of the probe's state
    if args.resume:
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=args.out / "checkpoint")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        probe.load_state_dict(torch.load(parted, weights_only=True))
        first = probe.steps

    for step in range(first, args.steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min((step + 1) / 10, 1.0) * (0.5 + 0.5 * math.cos(math.pi * step / 1000))
        ids = batch(data, step * mesh["dp"].size() + part).to(kind)
        with probe.step():
            optimizer.zero_grad()
            loss = model(ids[:, :-1], ids[:, 1:])
            loss.backward()
            clip(model, 1.0)
            optimizer.step()
        if RANK == 0 and (step + 1) % args.every == 0 and probe.latest is not None:
            worst = probe.latest.summary["worst_layer_ratio"]
            print(f"step {step + 1}: loss {loss.item():.4f}, no update more than {worst:.2g}x from typical")

    weights, moments = get_state_dict(model, optimizer)
    writer = dcp.FileSystemWriter(args.out / "checkpoint", overwrite=True)
    dcp.save({"model": weights, "optimizer": moments}, storage_writer=writer)
    torch.save(probe.state_dict(), parted)
    probe.close()
    if RANK == 0:
        print(f"\n{probe.table()}\n\nSee it:  spectral-monitor show {args.out}")
    dist.destroy_process_group()


def batch(data: Tensor, number: int) -> Tensor:
    """Windows of the text, one longer than the context: the same ones for the same number, resumed or not."""
    starts = torch.randint(len(data) - CONTEXT, (BATCH,), generator=torch.Generator().manual_seed(number))
    return torch.stack([data[start : start + CONTEXT + 1] for start in starts.tolist()])


if __name__ == "__main__":
    main()
