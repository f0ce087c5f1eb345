"""What the monitor costs: one real training run whose steps take turns plain, unmeasured and measured.

All three kinds run in one Trainer, one after the other, and are compared within each round of three, so a machine
whose speed drifts does not distort the ratios.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
import warnings
from typing import Any

import lightning.pytorch as pl
import logging_cost
import torch
from char_transformer import CharTransformer, loader, read_text
from lightning.pytorch.callbacks import Callback, TQDMProgressBar

from spectral_monitor import SpectralMonitor

KINDS = ("plain", "unmeasured", "measured")
HOOKS = ("on_train_batch_start", "on_before_backward", "on_after_backward", "on_train_batch_end")


class Rounds(Callback):
    """Gives every third step to the monitor as a measured one, every third as an unmeasured one, and times all."""

    def __init__(self, monitor: SpectralMonitor) -> None:
        self.monitor = monitor
        self.seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.hook_seconds: list[float] = []
        self._begin = 0.0
        self._in_hooks = 0.0

    def kind(self, trainer: pl.Trainer, done: int = 0) -> str:
        return KINDS[(trainer.global_step - done) % 3]

    def _delegate(self, hook: str, kind: str, *args: Any) -> None:
        if kind == "plain":
            return
        begin = time.perf_counter()
        getattr(self.monitor, hook)(*args)
        self._in_hooks += time.perf_counter() - begin

    def on_fit_start(self, *args: Any) -> None:
        self.monitor.on_fit_start(*args)

    def on_train_start(self, *args: Any) -> None:
        self.monitor.on_train_start(*args)

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self._in_hooks = 0.0
        self._begin = time.perf_counter()
        self._delegate("on_train_batch_start", self.kind(trainer), trainer, *args)

    def on_before_backward(self, trainer: pl.Trainer, *args: Any) -> None:
        self._delegate("on_before_backward", self.kind(trainer), trainer, *args)

    def on_after_backward(self, trainer: pl.Trainer, *args: Any) -> None:
        self._delegate("on_after_backward", self.kind(trainer), trainer, *args)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        kind = self.kind(trainer, done=1)
        self._delegate("on_train_batch_end", kind, trainer, *args)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[kind].append(time.perf_counter() - self._begin)
        if kind == "unmeasured":
            self.hook_seconds.append(self._in_hooks)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.monitor.teardown(trainer, pl_module, stage)


def measure(tier: str, args: argparse.Namespace) -> tuple[Rounds, SpectralMonitor, int]:
    pl.seed_everything(0, verbose=False)
    data, vocab = loader(read_text(args.data), args.batch_size, args.context)
    model = CharTransformer(vocab, args.width, args.depth, args.heads, args.context)
    monitor = SpectralMonitor(every_n_steps=3, quantities=tier)
    rounds = Rounds(monitor)
    trainer = pl.Trainer(
        max_steps=3 * (args.rounds + 1),
        accelerator=args.accelerator,
        devices=1,
        precision=args.precision,
        callbacks=[rounds, TQDMProgressBar(refresh_rate=1)],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data)
    return rounds, monitor, sum(p.numel() for p in model.parameters())


def report(tier: str, rounds: Rounds, monitor: SpectralMonitor, parameters: int) -> None:
    plain, unmeasured, measured = (rounds.seconds[kind][1:] for kind in KINDS)  # the first round warms up
    heavy = [m / p for m, p in zip(measured, plain, strict=True)]
    light = [u / p for u, p in zip(unmeasured, plain, strict=True)]
    plain_step = statistics.median(plain)
    books = statistics.median(rounds.hook_seconds)
    own = statistics.median(m.summary["overhead_ms"] for m in monitor.measurements) / 1e3
    print(f"\ntier {tier!r}, {parameters / 1e6:.1f} M parameters, {len(plain)} rounds, plain step {plain_step:.3f} s")
    print(f"  measured / plain    {statistics.median(heavy):.3f}   (rounds from {min(heavy):.3f} to {max(heavy):.3f})")
    print(f"  unmeasured / plain  {1 + books / plain_step:.6f}   ({books * 1e6:.0f} us in the monitor's hooks)")
    print(f"    whole steps in turn: {statistics.median(light):.3f} ({min(light):.3f} to {max(light):.3f}): noise")
    print(f"  the monitor's own clock, overhead_ms / plain  {own / plain_step:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", default=None, help="text file to train on; without one the licence text")
    parser.add_argument("--rounds", type=int, default=12, help="rounds of three steps that count")
    parser.add_argument("--tiers", nargs="+", default=["standard", "light"], help="tiers to measure")
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--precision", default="32-true")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", message="no logger")
    for tier in args.tiers:
        report(tier, *measure(tier, args))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{torch.get_num_threads()} CPU threads"
    print(f"\n{platform.platform()}, {device}, torch {torch.__version__}, precision {args.precision}")
    logging_cost.report()


if __name__ == "__main__":
    main()
