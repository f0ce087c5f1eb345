"""What a measured step costs on several processes: ratios of time, and exact counts of what is sent.

    python -m benchmarks.counting.scaling          # 1, 2 and 4 processes; 4, 16 and 64 weights; DDP and FSDP2
    python -m benchmarks.counting.scaling --quick  # 1 and 2 processes; 4 and 16 weights
    python -m benchmarks.counting.scaling --write docs/scaling.md

It starts its processes itself, on this machine, over gloo. Within one run steps take turns plain and measured, so that
the ratios are of one run; still they are noisy, and where there are fewer cores than processes they include waiting.
Counts are exact: collectives, bytes this process hands to them, steps of block Lanczos.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import spectral_monitor.engine.features.stage as activations
import spectral_monitor.engine.weights.norms as norms
from benchmarks.char_transformer import CharTransformer, loader, read_text
from benchmarks.sections import write
from spectral_monitor import SpectralMonitor
from spectral_monitor.linalg.lanczos import BLOCK, KrylovSpace

Shape = tuple[int, int, str]
"""fan_out, fan_in and role of a matrix."""
PURPOSES = ("matrices", "rows", "inputs", "rest")
"""Norms of weights, updates and drift; of rows of features and gradients; the inputs alignments are measured on."""


@dataclass(frozen=True)
class Case:
    """One run: what is trained, how, on how many processes."""

    ranks: int
    strategy: str
    tier: str
    blocks: int
    width: int = 128
    heads: int = 4
    context: int = 32
    batch: int = 4
    rounds: int = 3
    every: int = 2
    data: str | None = None


@dataclass
class Tally:
    """Counts one measured step, in the generators that ask for sums.

    Attributes:
        bytes: by purpose, handed to sums.
        spaces: the purpose, sums a block step takes, and of each matrix the block steps of Lanczos.
    """

    bytes: Counter[str] = field(default_factory=Counter)
    spaces: list[tuple[str, int, Tensor]] = field(default_factory=list)
    purpose: str = "rest"

    def clear(self) -> None:
        self.bytes.clear()
        self.spaces.clear()

    def under(self, purpose: str, routine: Any) -> Any:
        """The routine, what it asks for counted as for this purpose."""
        answer = None
        while True:
            before, self.purpose = self.purpose, purpose
            try:
                request = routine.send(answer)
            except StopIteration as end:
                return end.value
            finally:
                self.purpose = before
            self.bytes[purpose] += sum(t.numel() * t.element_size() for t in request)
            answer = yield request

    def named(self, method: Callable[..., Any], purpose: Callable[..., str]) -> Callable[..., Any]:
        return functools.wraps(method)(lambda *args, **kw: self.under(purpose(*args), method(*args, **kw)))

    @contextmanager
    def watching(self) -> Iterator[None]:
        step = KrylovSpace.step

        def noted(space: Any, rider: Tensor) -> Any:
            if not hasattr(space, "noted"):
                space.noted = torch.zeros(len(space.members), dtype=torch.int64)
                self.spaces.append((self.purpose, 2 if space.columns_split else int(space.split), space.noted))
            space.noted[[space.members[i] for i in space.undecided]] += 1
            return step(space, rider)

        rows, matrices = activations.RowStage, norms.MatrixNorms
        with (
            patch.object(KrylovSpace, "step", noted),
            patch.object(norms, "spectral_estimates", self.named(norms.spectral_estimates, lambda *args: "matrices")),
            patch.object(matrices, "_products", self.named(matrices._products, lambda *args: "inputs")),
            patch.object(rows, "_solve", self.named(rows._solve, lambda *args: "rows")),
            patch.object(rows, "sample", self.named(rows.sample, lambda *args: "inputs")),
        ):
            yield

    def steps(self) -> dict[str, list[int]]:
        steps: dict[str, list[int]] = {}
        for purpose, _, counts in self.spaces:
            steps.setdefault(purpose, []).extend(counts.tolist())
        return steps

    def path(self) -> int:
        """Collectives of the longest Lanczos: all others go along."""
        return max((sums * int(counts.max()) for _, sums, counts in self.spaces), default=0)


class Training(pl.LightningModule):
    def __init__(self, case: Case, vocab: int) -> None:
        super().__init__()
        self.case = case
        self.net = CharTransformer(vocab, case.width, case.blocks, case.heads, case.context)

    def configure_model(self) -> None:
        if self.case.strategy == "fsdp2" and self.case.ranks > 1 and not hasattr(self.net, "unshard"):
            for part in (*self.net.blocks, self.net):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(*batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Turns(pl.Callback):
    """Times every step, plain and measured in turn, and reads the counters around each; one before the monitor, and
    one after it.
    """

    def __init__(self, monitor: SpectralMonitor, tally: Tally, every: int) -> None:
        self.monitor, self.tally, self.every = monitor, tally, every
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self.counted: list[dict[str, Any]] = []
        self._begin = 0.0
        self._sent = (0, 0)

    def sent(self) -> tuple[int, int]:
        processes = self.monitor._engine and self.monitor._engine.processes
        return (processes.collectives, processes.bytes) if processes else (0, 0)

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.tally.clear()
        self._sent = self.sent()
        self._begin = time.perf_counter()

    def end(self, trainer: pl.Trainer) -> None:
        measured = trainer.global_step % self.every == 0
        self.seconds[measured].append(time.perf_counter() - self._begin)
        if measured:
            collectives, size = (now - then for now, then in zip(self.sent(), self._sent, strict=True))
            by = {purpose: self.tally.bytes[purpose] for purpose in PURPOSES}
            by["rest"] = size - sum(by.values()) if collectives else 0
            steps = self.tally.steps()
            path = self.tally.path()
            self.counted.append({"collectives": collectives, "bytes": size, "by": by, "steps": steps, "path": path})


class Last(pl.Callback):
    def __init__(self, turns: Turns) -> None:
        self.turns = turns

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.turns.end(trainer)


def measure(case: Case) -> dict[str, Any]:
    """Train as the case says; what was counted in its last measured step, and the ratios of all but the first."""
    pl.seed_everything(0, verbose=False)
    data, vocab = loader(read_text(case.data), case.batch, case.context)
    module = Training(case, vocab)
    tally, monitor = Tally(), SpectralMonitor(every_n_steps=case.every, quantities=case.tier, drift_every=1000)
    turns = Turns(monitor, tally, case.every)
    strategy = ModelParallelStrategy(case.ranks, 1) if case.strategy == "fsdp2" else DDPStrategy()
    trainer = pl.Trainer(
        strategy=strategy if case.ranks > 1 else "auto",
        accelerator="cpu",
        devices=case.ranks,
        max_steps=case.every * (case.rounds + 1),
        callbacks=[turns, monitor, Last(turns)],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    shapes: list[Shape] = []
    with tally.watching(), open(os.devnull, "w") as nowhere, patch.object(sys, "stdout", nowhere):
        trainer.fit(module, data)
    layers = [info for info in monitor.latest.layers if info.role != "vector"]
    for info in layers:
        shapes += [(info.shape[0] // info.blocks, info.shape[1], info.role)] * info.blocks
    plain, measured = turns.seconds[False], turns.seconds[True]
    plain = [statistics.median(plain[i : i + case.every - 1]) for i in range(0, len(plain), case.every - 1)]
    ratios = [m / p for m, p in zip(measured, plain, strict=True)][1:]
    layer_shapes = [(*info.shape, info.role) for info in layers]
    plain_step = statistics.median(plain[1:])
    return {"ratios": ratios, "plain": plain_step, "shapes": shapes, "layers": layer_shapes, **turns.counted[-1]}


def work(rank: int, ranks: int, cases: list[Case], folder: str) -> None:
    """One of the processes: all cases, one after the other; the first one writes down what came out."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    os.environ.update(
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        | {"GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "TORCHELASTIC_RUN_ID": "scaling"}
    )
    torch.set_num_threads(1)
    if ranks > 1:
        store = dist.FileStore(str(Path(folder) / f"store{ranks}"), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    for number, case in enumerate(cases):
        begin = time.perf_counter()
        result = measure(case)
        if rank == 0:
            (Path(folder) / f"{ranks}.{number}.json").write_text(json.dumps(result))
            label = f"{case.strategy}, {case.tier}, {4 * case.blocks} weights in blocks"
            print(f"{ranks} ranks: {label}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    if ranks > 1:
        dist.destroy_process_group()


def run(cases: list[Case]) -> dict[Case, dict[str, Any]]:
    """Run every case and return the outcomes; those of one number of processes share their start."""
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    results: dict[Case, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in sorted({case.ranks for case in cases}):
            group = [case for case in cases if case.ranks == ranks]
            mp.spawn(work, (ranks, group, folder), nprocs=ranks)
            for number, case in enumerate(group):
                results[case] = json.loads((Path(folder) / f"{ranks}.{number}.json").read_text())
    return results


def bound(result: dict[str, Any], steps: int) -> int:
    """4 x steps x sum(fan_in + fan_out) numbers of 4 bytes."""
    return 4 * steps * sum(m + n for m, n, _ in result["shapes"]) * 4


def times(results: dict[Case, dict[str, Any]]) -> str:
    """The table of times, as Markdown."""
    lines = [
        "| strategy | tier | weights in blocks | ranks | measured / plain | plain step, s |",
        "|---|---|---|---|---|---|",
    ]
    for case, result in results.items():
        ratios = result["ratios"]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        way = "one process" if case.ranks == 1 else case.strategy
        cells = [way, case.tier, 4 * case.blocks, case.ranks, spread, f"{result['plain']:.2f}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def counts(results: dict[Case, dict[str, Any]]) -> str:
    """The table of one measured step of one process: KB handed to sums, by purpose; block steps of Lanczos."""
    head = ["strategy", "tier", "weights in blocks", "ranks", "collectives", "of Lanczos", "KB", *PURPOSES]
    head += ["block steps, mean", "most", "KB / bound, block steps", "KB / bound, directions"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for case, result in results.items():
        if case.ranks == 1:
            continue
        steps = [step for counted in result["steps"].values() for step in counted]
        mean, most = (statistics.mean(steps), max(steps)) if steps else (0.0, 0)
        cells = [case.strategy, case.tier, 4 * case.blocks, case.ranks, result["collectives"], result["path"]]
        cells += [f"{size / 1e3:.0f}" for size in (result["bytes"], *(result["by"][purpose] for purpose in PURPOSES))]
        cells += [f"{mean:.1f}", most]
        cells += [f"{result['bytes'] / bound(result, times * most):.2f}" if most else "" for times in (1, BLOCK)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def table_of_cases(args: argparse.Namespace) -> list[Case]:
    ranks, blocks = ([1, 2], [1, 4]) if args.quick else ([1, 2, 4], [1, 4, 16])
    return [
        Case(count, strategy, tier, depth, rounds=args.rounds, data=args.data)
        for strategy in ("ddp", "fsdp2")
        for tier in ("light", "standard")
        for depth in blocks
        for count in ranks
        if count > 1 or strategy == "ddp"  # one process is one process
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=None, help="text file to train on; without one the licence text")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of a plain and a measured step that count")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller runs")
    parser.add_argument("--write", metavar="PAGE", help="write the tables into a page too")
    args = parser.parse_args()
    results = run(table_of_cases(args))
    machine = (
        f"{os.cpu_count()} CPU cores, gloo, torch {torch.__version__.partition('+')[0]}, {time.strftime('%Y-%m-%d')}."
    )
    for name, text in (("times", f"{times(results)}\n\n{machine}"), ("counts", counts(results))):
        print(f"{text}\n")
        if args.write:
            write(Path(args.write), name, text)


if __name__ == "__main__":
    main()
