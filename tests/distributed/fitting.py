"""Trains by names, alone or on several processes, and returns plain values: what a task of other processes can send."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor
from torch.distributed.tensor import DTensor

from spectral_monitor import SpectralCondition, SpectralMonitor
from tests.distributed.models import NETWORKS, Training, batches
from tests.distributed.ways import WAYS
from tests.noninterference.recorder import RecordingLogger, Run

Weights = dict[str, Tensor]


def fit(
    way: str,
    network: str,
    steps: int,
    callbacks: Sequence[pl.Callback] = (),
    optimizer: str = "sgd",
    data: Any = None,
    module: Training | None = None,
    ckpt: str | None = None,
    **trainer: Any,
) -> Training:
    """Train without a word; on one process if no group was made, else in the given way."""
    part, parts = WAYS[way].part() if way else (0, 1)
    if module is None:
        module = Training(network, optimizer, WAYS[way].shard if way else None)
    torch.manual_seed(5 + part)  # dropout; the processes that share a batch must drop alike
    settings = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "log_every_n_steps": 1,
        "logger": RecordingLogger(Run()),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        **(WAYS[way].trainer() if way else {"devices": 1}),
        **trainer,
    }
    runner = pl.Trainer(**settings, callbacks=list(callbacks))
    runner.fit(module, data or batches(network, steps, part, parts), ckpt_path=ckpt)
    return module


def whole(module: Training, network: str) -> Weights:
    """Copies of the parameters, put together from all processes; a collective."""
    weights: Weights = {}
    shapes = {f"net.{name}": p.shape for name, p in NETWORKS[network]().named_parameters()}
    for name, p in module.named_parameters():
        name, value = name.replace("_fsdp_wrapped_module.", ""), p.detach()
        if isinstance(value, DTensor):
            weights[name] = value.full_tensor().clone()
        elif not isinstance(module.trainer.strategy, FSDPStrategy):
            weights[name] = value.clone()
        else:  # a piece of the flattened parameter, maybe none
            pieces: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(pieces, value.flatten().clone())
            weights[name] = torch.cat(pieces).view(shapes[name])
    return weights


class Keeper(pl.Callback):
    """Keeps the weights, put together, at the start and after every step, and the losses."""

    def __init__(self, network: str) -> None:
        self.network, self.weights, self.losses = network, [], []

    def on_train_start(self, trainer: pl.Trainer, module: Training) -> None:
        self.weights.append(whole(module, self.network))

    def on_train_batch_end(self, trainer: pl.Trainer, module: Training, outputs: Any, *rest: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        self.weights.append(whole(module, self.network))


def train(way: str, network: str, optimizer: str = "sgd", steps: int = 3) -> dict[str, Any]:
    """Losses and weights of a run without the monitor."""
    keeper = Keeper(network)
    fit(way, network, steps, [keeper], optimizer)
    return {"losses": keeper.losses, "weights": keeper.weights}


def measure(
    way: str,
    network: str,
    optimizer: str = "sgd",
    steps: int = 3,
    tol: float = 1e-6,
    low_memory: bool = False,
    largest: float | None = None,
) -> dict[str, Any]:
    """Every measurement of a run, and the weights it was of; ``largest``: norm of gradients that are clipped."""
    narrow = SpectralCondition(band=(0.8, 1.25), persistence=1)  # so that there are verdicts to compare
    options = {"tol": tol, "drift_every": 2, "low_memory": low_memory, "condition": narrow, "mode": "observe"}
    monitor = SpectralMonitor(**{"every_n_steps": 1, "replay_samples": None, **options})
    keeper = Keeper(network)
    fit(way, network, steps, [monitor, keeper], optimizer, gradient_clip_val=largest)
    return {"measurements": [plain(m) for m in monitor.measurements], "weights": keeper.weights}


def plain(measurement: Any) -> dict[str, Any]:
    """A measurement without the time it took."""
    return {
        "step": measurement.step,
        "layers": [vars(info) for info in measurement.layers],
        "values": {key: value.tolist() for key, value in measurement.values.items()},
        "summary": {key: value for key, value in measurement.summary.items() if key != "overhead_ms"},
        "why": {
            f"{key}/{info.name}": measurement.why(key, info.name)
            for key, value in measurement.values.items()
            for info, v in zip(measurement.layers, value.tolist(), strict=True)
            if math.isnan(v)
        },
        "verdicts": [verdict.to_row() for verdict in measurement.verdicts],
        "states": {name: str(state) for name, state in measurement.states.items()},
    }
