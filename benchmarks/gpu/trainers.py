"""Ways to train on a GPU with Lightning's Trainer, each with and without the monitor; for ``make gpu``.

Training has to end with the same bits, and the spectral norms have to be those of an SVD.
"""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader

from benchmarks.char_transformer import CharTransformer, Windows, read_text
from spectral_monitor import SpectralLRCorrector, SpectralMonitor
from spectral_monitor.quantities import TIERS

STEPS = 6
QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_model_summary", "enable_progress_bar"), False)


class Transformer(CharTransformer):
    """With dropout after its embeddings, and settings for its optimizer."""

    def __init__(self, dropout: float = 0.1, **optimizer: Any) -> None:
        super().__init__(96, 128, 2, 4, 64)
        self.optimizer_settings = optimizer
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.dropout(self.tok(x) + self.pos(torch.arange(x.shape[1], device=x.device)))
        return nn.functional.cross_entropy(self.head(self.norm(self.blocks(h))).flatten(0, 1), y.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, **self.optimizer_settings)


class Sharded(Transformer):
    """Shards its blocks and itself, as FSDP2 wants it."""

    def configure_model(self) -> None:
        """Shard the blocks, then what is left."""
        mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
        for block in (*self.blocks, self):
            fully_shard(block, mesh=mesh)


class Images(pl.LightningModule):
    """A convolutional network with batch normalization whose channels come last in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 64, 3, padding=1, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, padding=1, groups=64),
            nn.Conv2d(64, 128, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.head = nn.Linear(128, 96)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        images = x[:, :48].float().view(-1, 3, 4, 4).repeat(1, 1, 4, 4).contiguous(memory_format=torch.channels_last)
        loss: Tensor = nn.functional.cross_entropy(self.head(self.body(images / 96)), y[:, 0])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, foreach=True)


@dataclass(frozen=True)
class Way:
    """One way to train.

    Args:
        make: the model.
        trainer: settings of the Trainer.
        monitor: settings of the callback.
        compiled: settings of ``torch.compile`` of the model's forward, if it is compiled.
        strategy: made anew for each fit.
        corrects: whether the callback corrects learning rates.
    """

    make: Callable[[], pl.LightningModule] = Transformer
    trainer: Mapping[str, Any] = field(default_factory=dict)
    monitor: Mapping[str, Any] = field(default_factory=dict)
    compiled: Mapping[str, Any] | None = None
    strategy: Callable[[], Any] | None = None
    corrects: bool = False

    def callback(self) -> SpectralMonitor:
        """Return a new callback that measures every step."""
        if self.corrects:
            return SpectralLRCorrector(every_n_steps=1, verbose=False)
        return SpectralMonitor(
            every_n_steps=1, mode="observe", verbose=False, **{"quantities": "standard"} | dict(self.monitor)
        )


HALF = {"precision": "bf16-mixed"}
PLAIN = "float32"
WAYS = {
    PLAIN: Way(),
    "16-mixed, with a gradient scaler": Way(trainer={"precision": "16-mixed"}),
    "bf16-mixed": Way(trainer=HALF),
    "bf16-true": Way(trainer={"precision": "bf16-true"}),
    "float64": Way(trainer={"precision": "64-true"}),
    "fused AdamW, 16-mixed": Way(lambda: Transformer(fused=True), {"precision": "16-mixed"}),
    "AdamW with `capturable=True`": Way(lambda: Transformer(capturable=True)),
    "two batches to a step, clipped, bf16-mixed": Way(
        trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, **HALF}
    ),
    "convolutions, channels last, bf16-mixed": Way(Images, HALF),
    "`low_memory=True`, bf16-mixed": Way(trainer=HALF, monitor={"low_memory": True}),
    "`replay_samples=None`, bf16-mixed": Way(trainer=HALF, monitor={"replay_samples": None}),
    'tier `"full"`': Way(monitor={"quantities": "full"}),
    "`torch.compile`, bf16-mixed": Way(lambda: Transformer(0.0), HALF, compiled={}),
    "`torch.compile` with CUDA graphs, bf16-mixed": Way(
        lambda: Transformer(0.0), HALF, compiled={"mode": "reduce-overhead"}
    ),
    "DDP over NCCL, bf16-mixed": Way(trainer=HALF, strategy=lambda: "ddp"),
    "FSDP over NCCL, bf16-mixed": Way(trainer=HALF, strategy=lambda: FSDPStrategy(auto_wrap_policy={nn.Linear})),
    "FSDP2 over NCCL, bf16-true": Way(
        Sharded, {"precision": "bf16-true"}, strategy=lambda: ModelParallelStrategy(data_parallel_size=1)
    ),
    "`SpectralLRCorrector()`, bf16-mixed": Way(trainer=HALF, corrects=True),
}


class Recorder(Callback):
    """Keeps the weights before the last step and after it."""

    def __init__(self) -> None:
        self.before: dict[str, Tensor] = {}
        self.after: dict[str, Tensor] = {}

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self.before = weights(trainer.strategy.model)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.after = weights(trainer.strategy.model)


def weights(model: nn.Module | None) -> dict[str, Tensor]:
    """Return copies of all parameters in host memory, by name and whole."""
    assert model is not None
    sharded = isinstance(model, FullyShardedDataParallel)
    parameters = {}
    with FullyShardedDataParallel.summon_full_params(model, writeback=False) if sharded else nullcontext():
        for name, p in model.named_parameters():
            full = p.full_tensor() if hasattr(p, "full_tensor") else p
            for prefix in ("_fsdp_wrapped_module.", "_forward_module.", "_orig_mod.", "module."):
                name = name.replace(prefix, "")
            parameters[name] = full.detach().cpu().clone()
    return parameters


@dataclass(frozen=True)
class Outcome:
    """What came of one way.

    Args:
        same: whether two trainings end with the same bits, of which one is watched; of a correction both are.
        repeats: whether two do that of which none is watched; not tried unless the others differ.
        numbers: quantities of matrices in the last step.
        missing: which of them are NaN, with the reason.
        norm_error: the largest difference of a spectral norm from that of an SVD in float64, relative to it.
        error: what went wrong; everything else is missing then.
    """

    same: bool = False
    repeats: bool = True
    numbers: int = 0
    missing: Mapping[tuple[str, str], str] = field(default_factory=dict)
    norm_error: float = math.nan
    error: str = ""


def fit(way: Way, accelerator: str, watch: Callback | None) -> Recorder:
    """Train for a few steps."""
    pl.seed_everything(0, verbose=False)
    module, recorder = way.make(), Recorder()
    if way.compiled is not None:
        torch._dynamo.reset()
        module.compile(**way.compiled)
    settings = dict(way.trainer) | ({"strategy": way.strategy()} if way.strategy else {})
    callbacks = [recorder, *([watch] if watch else [])]
    with warnings.catch_warnings(), open(os.devnull, "w") as nowhere, patch.object(sys, "stdout", nowhere):
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            accelerator=accelerator, devices=1, max_steps=STEPS, callbacks=callbacks, **{**QUIET, **settings}
        )
        try:
            trainer.fit(module, DataLoader(Windows(read_text(None), 64), 8))
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
    return recorder


def outcome(way: Way, accelerator: str) -> Outcome:
    """Train twice, once of them watched, and compare."""
    watch = way.callback()
    other, watched = fit(way, accelerator, way.callback() if way.corrects else None), fit(way, accelerator, watch)
    same = equal(other, watched)
    last = watch.measurements[-1]
    matrices = [info for info in last.layers if info.is_matrix]
    every = [(key, info.name) for info in matrices for key in last.values]
    norm_errors = []
    for info in matrices:
        W = watched.before.get(f"{info.name}.weight") if "weight_norm" in last.values else None
        if W is not None and W.ndim == 2 and info.blocks == 1 and info.role != "embedding":
            exact = float(torch.linalg.matrix_norm(W.double(), 2))
            norm_errors.append(abs(last.value("weight_norm", info.name) / exact - 1))
    return Outcome(
        same=same,
        repeats=same or way.corrects or equal(other, fit(way, accelerator, None)),
        numbers=len(every),
        missing={pair: last.why(*pair) for pair in every if math.isnan(last.value(*pair))},
        norm_error=max(norm_errors, default=math.nan),
    )


def equal(a: Recorder, b: Recorder) -> bool:
    """Return whether two trainings ended with the same bits."""
    return a.after.keys() == b.after.keys() and all(torch.equal(W, b.after[name]) for name, W in a.after.items())


def tried(accelerator: str, titles: Iterable[str] = tuple(WAYS)) -> dict[str, Outcome]:
    """Return what came of some ways; one that fails does not stop the others."""
    deterministic = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True  # or no training is that of the run before
    outcomes = {}
    try:
        for title in titles:
            try:
                outcomes[title] = outcome(WAYS[title], accelerator)
            except Exception as error:
                outcomes[title] = Outcome(error=f"{type(error).__name__}: {error}".splitlines()[0])
    finally:
        torch.backends.cudnn.deterministic = deterministic
    return outcomes


def rows(outcomes: Mapping[str, Outcome]) -> list[list[str]]:
    """Return rows of a table: the way, the bits, norms against an SVD, and numbers, with those that are missing of tier
    standard though they are defined in float32.
    """
    undefined = outcomes[PLAIN].missing.keys() if PLAIN in outcomes else set()
    table = []
    for title, outcome in outcomes.items():
        if outcome.error:
            table.append([title, f"**fails**: {outcome.error}", "", ""])
            continue
        missing = {pair: reason for pair, reason in outcome.missing.items() if pair not in undefined}
        reasons = [reason for (key, _), reason in missing.items() if key in TIERS["standard"]]
        table.append(
            [
                title,
                "the same" if outcome.same else "**differ**" if outcome.repeats else "differ, as without it",
                "-" if math.isnan(outcome.norm_error) else f"{outcome.norm_error:.1e}",
                f"{outcome.numbers}, {len(reasons)} NaN: {'; '.join(sorted(set(reasons)))}"
                if reasons
                else str(outcome.numbers),
            ]
        )
    return table
