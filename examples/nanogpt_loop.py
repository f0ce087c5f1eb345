"""A loop like nanoGPT's with the probe around its steps: accumulated gradients, autocast, clipping, DDP, torch.compile.

python examples/nanogpt_loop.py                                     # one process
python examples/nanogpt_loop.py --dtype bfloat16 --compile          # as nanoGPT runs by default
torchrun --nproc-per-node 2 examples/nanogpt_loop.py                # DDP, each process with batches of its own
python examples/nanogpt_loop.py --resume --steps 80                 # goes on from the last checkpoint in --out
"""

from __future__ import annotations

import argparse
import math
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from spectral_monitor import SpectralProbe
from spectral_monitor.reporting import JSONLinesSink

RANK, PROCESSES = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # as torchrun sets them
TEXT = (Path(__file__).parents[1] / "LICENSE").read_text()
CONTEXT, BATCH, HEADS, LAYERS = 32, 8, 4, 2


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.mlp_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.c_attn(self.ln_1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(CONTEXT, width)
        self.h, self.ln_f = nn.ModuleList(Block(width) for _ in range(LAYERS)), nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.wte.weight = self.lm_head.weight
        for name, p in self.named_parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * LAYERS) if name.endswith("proj.weight") else 0.02)

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps; default: 40")
    parser.add_argument("--every", type=int, default=10, help="measure every n-th step; default: 10")
    parser.add_argument("--accumulate", type=int, default=4, help="micro-batches of a step; default: 4")
    parser.add_argument("--width", type=int, default=64, help="default: 64")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--out", type=Path, default=Path("runs/nanogpt"), help="default: %(default)s")
    args = parser.parse_args()

    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    kind = device.partition(":")[0]
    if PROCESSES > 1:
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    torch.manual_seed(0)
    letters = {c: i for i, c in enumerate(sorted(set(TEXT)))}
    data = torch.tensor([letters[c] for c in TEXT])
    raw = GPT(len(letters), args.width).to(device)
    decayed = [p for p in raw.parameters() if p.ndim > 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": [p for p in raw.parameters() if p.ndim < 2]}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    autocast = torch.autocast(kind, getattr(torch, args.dtype)) if args.dtype != "float32" else nullcontext()
    scaler = torch.amp.GradScaler(kind, enabled=args.dtype == "float16")
    model: Any = torch.compile(raw) if args.compile else raw
    if PROCESSES > 1:
        model = DistributedDataParallel(model)

    # The probe: once the model is compiled and wrapped, in all processes.
    args.out.mkdir(parents=True, exist_ok=True)
    sink = JSONLinesSink(args.out / "spectral_monitor.jsonl", {"model": "GPT"})
    probe = SpectralProbe(model, optimizer, every_n_steps=args.every, blocks={"*c_attn": 3}, sinks=[sink])
    first, saved = 0, args.out / f"checkpoint-{RANK}.pt"  # each process has its part of the probe's state
    if args.resume:
        state = torch.load(saved, map_location=device, weights_only=True)
        for part, key in ((raw, "model"), (optimizer, "optimizer"), (scaler, "scaler"), (probe, "probe")):
            part.load_state_dict(state[key])
        first = state["step"]

    for step in range(first, args.steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min((step + 1) / 10, 1.0)
        loss = torch.zeros(())
        with probe.step(accumulated=args.accumulate):
            for micro in range(args.accumulate):
                if PROCESSES > 1:  # gradients are summed over the processes at the last micro-batch alone
                    model.require_backward_grad_sync = micro == args.accumulate - 1
                ids = batch(data, (step * args.accumulate + micro) * PROCESSES + RANK).to(device)
                with autocast:
                    _, loss = model(ids[:, :-1], ids[:, 1:])
                scaler.scale(loss / args.accumulate).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(raw.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
        if RANK == 0 and (step + 1) % args.every == 0 and probe.latest is not None:
            worst = probe.latest.summary["worst_layer_ratio"]
            print(f"step {step + 1}: loss {loss.item():.4f}, no update more than {worst:.2g}x from typical")

    parts = {"model": raw, "optimizer": optimizer, "scaler": scaler, "probe": probe}
    torch.save({key: part.state_dict() for key, part in parts.items()} | {"step": args.steps}, saved)
    probe.close()
    if RANK == 0:
        print(f"\n{probe.table()}\n\nSee it:  spectral-monitor show {args.out}")
    if PROCESSES > 1:
        dist.destroy_process_group()


def batch(data: Tensor, number: int) -> Tensor:
    """Windows of the text, one longer than the context: the same ones for the same number, resumed or not."""
    starts = torch.randint(len(data) - CONTEXT, (BATCH,), generator=torch.Generator().manual_seed(number))
    return torch.stack([data[start : start + CONTEXT + 1] for start in starts.tolist()])


if __name__ == "__main__":
    main()
