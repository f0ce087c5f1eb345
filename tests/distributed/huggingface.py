"""Hugging Face's Trainer on several processes, with the callback or without one."""

from __future__ import annotations

import os
import random
import tempfile
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

from spectral_monitor import SpectralCondition, SpectralMonitorWarning
from spectral_monitor.integrations.hf import SpectralCallback
from tests.distributed.bits import LocalBits
from tests.distributed.fitting import plain
from tests.noninterference import recorder
from tests.noninterference.recorder import Run, differences, leaves, of_module, of_optimizer, of_random

VOCABULARY, LENGTH, ROWS = 40, 12, 8
"""Of the language model; rows of the batch of all processes together."""


class Net(nn.Module):
    """Means its loss over its rows, as models that know nothing of the Trainer do."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.hidden, self.head = nn.Linear(12, 70), nn.Linear(70, 66), nn.Linear(66, 3)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.dropout(self.hidden(self.up(x).tanh()).tanh()))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def language_model(dropout: float = 0.0) -> nn.Module:
    """Divides the sum of its losses by the tokens of the whole step, of all processes, as the Trainer tells it."""
    rates = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), dropout)
    sizes = {"n_positions": LENGTH, "n_embd": 72, "n_layer": 2, "n_head": 4}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM", **sizes, **rates)
    )


NETWORKS = {"net": Net, "language model": language_model}


class Data(Dataset[dict[str, Tensor]]):
    """Random rows."""

    def __init__(self, network: str) -> None:
        generator = torch.Generator().manual_seed(3)
        if network == "net":
            self.columns = {
                "x": torch.randn(128, 12, generator=generator),
                "labels": torch.randint(3, (128,), generator=generator),
            }
        else:
            ids = torch.randint(VOCABULARY, (128, LENGTH), generator=generator)
            lengths = torch.randint(LENGTH // 3, LENGTH + 1, (128, 1), generator=generator)
            labels = ids.where(torch.arange(LENGTH) < lengths, -100)  # processes have different numbers of tokens
            self.columns = {"input_ids": ids, "labels": labels}

    def __len__(self) -> int:
        return 128

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {key: column[i] for key, column in self.columns.items()}


def processes() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def trainer(
    way: str, network: str, *callbacks: TrainerCallback, dropout: float = 0.0, folder: str = "", **arguments: Any
) -> Trainer:
    """A Trainer of the same weights in all processes: ``way`` is ``"ddp"``, ``"fsdp2"`` or ``""``."""
    set_seed(1)
    net = NETWORKS[network](dropout)
    settings = {
        "output_dir": folder or tempfile.mkdtemp(),
        "max_steps": 3,
        "per_device_train_batch_size": ROWS // processes(),
        "train_sampling_strategy": "sequential",
        "learning_rate": 0.1,
        "optim": "sgd",
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "ddp_backend": "gloo" if processes() > 1 else None,
        "dataloader_pin_memory": False,
        "max_grad_norm": 0,
        **arguments,
    }
    if way != "fsdp2":
        return Trainer(net, TrainingArguments(**settings), train_dataset=Data(network), callbacks=list(callbacks))
    parts = "Linear" if network == "net" else "GPT2Block"
    config = {"version": 2, "transformer_layer_cls_to_wrap": [parts]}
    # Accelerate shards models on accelerators only: it is told that the processors are some.
    found = ("gloo", DistributedType.MULTI_GPU)
    device = mock.patch.dict(os.environ, ACCELERATE_TORCH_DEVICE="cpu")
    with device, mock.patch.object(PartialState, "_prepare_backend", return_value=found):
        settings |= {"fsdp": "full_shard", "fsdp_config": config}
        return Trainer(net, TrainingArguments(**settings), train_dataset=Data(network), callbacks=list(callbacks))


EXACT = {"every_n_steps": 1, "tol": 1e-6, "drift_every": 2, "replay_samples": None, "mode": "observe", "verbose": 0}


def measure(way: str, network: str, accumulate: int = 1, **arguments: Any) -> dict[str, Any]:
    """Every measurement of three steps."""
    narrow = SpectralCondition(band=(0.8, 1.25), persistence=1)  # so that there are verdicts to compare
    spectral = SpectralCallback(**EXACT, condition=narrow)
    job = trainer(way, network, spectral, gradient_accumulation_steps=accumulate, **arguments)
    job.train()
    return {"measurements": [plain(m) for m in spectral.measurements], "model": type(job.model_wrapped).__name__}


def correct(way: str, network: str, accumulate: int = 1, **arguments: Any) -> dict[str, Any]:
    """What a correction makes of five steps: how far they go along their line, and the measurements of the last one."""
    spectral = SpectralCallback(mode="correct", quantities="light", tol=1e-6, verbose=0)
    job = trainer(way, network, spectral, gradient_accumulation_steps=accumulate, max_steps=5, **arguments)
    job.train()
    assert spectral.latest is not None
    return {
        "edges": [m.summary["edge"] for m in spectral.measurements],
        "why": spectral.latest.why("edge", "summary"),
        "lr": spectral.latest.values["lr"].tolist(),
    }


class Reader(TrainerCallback):
    """Everything after every step, the hooks too."""

    def __init__(self) -> None:
        self.run = Run()

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, **_: Any) -> None:
        self.run.add(f"step {state.global_step}", of_module(model), of_optimizer(optimizer.optimizer), of_random())


class Naive(TrainerCallback):
    """What a monitor must not do: the forward again, with other dropout, drawn from the generator training uses."""

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, train_dataloader: Any, **_: Any) -> None:
        with torch.no_grad():
            model(**next(iter(train_dataloader)))


def compare(way: str, network: str, watch: str = "callback", accumulate: int = 1) -> dict[str, Any]:
    """Two runs, one of them watched: what differed, and how much there was to compare."""
    recorder.Bits = LocalBits  # read by the recorder's functions when they run
    runs, measured = [], 0
    for watched in ("", watch):
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        reader, spectral = Reader(), SpectralCallback(2, drift_every=1, verbose=0, mode="observe")
        callbacks = {"": [], "callback": [spectral], "naive": [Naive()]}[watched]
        more = {"gradient_accumulation_steps": accumulate, "max_steps": 6, "optim": "adamw_torch", "max_grad_norm": 0.5}
        job = trainer(way, network, *callbacks, reader, dropout=0.2, learning_rate=0.003, logging_steps=1, **more)
        job.train()
        kept = ("loss", "grad_norm", "learning_rate")
        history = [{key: row[key] for key in kept if key in row} for row in job.state.log_history]
        reader.run.add("end", dict(leaves("log", history)))
        runs.append(reader.run)
        measured = len(spectral.measurements)
    compared = {kind: runs[0].tensors(kind) for kind in ("parameter", "optimizer", "random")}
    return {"differences": differences(*runs)[:20], "measured": measured, "compared": compared}


class Stops(TrainerCallback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == self.at


def run(way: str, network: str, folder: str, stop: int = 0, resume: bool = False) -> tuple[list[Any], list[str]]:
    """Measurements of six steps, with a checkpoint after three, and what was said."""
    spectral = SpectralCallback(**{**EXACT, "drift_every": 1})
    callbacks = [spectral, Stops(stop)] if stop else [spectral]
    saving = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6, "gradient_accumulation_steps": 2}
    job = trainer(way, network, *callbacks, dropout=0.2, folder=folder, optim="adamw_torch", **saving)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SpectralMonitorWarning)
        job.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-3") if resume else None)
    said = [str(w.message) for w in caught if issubclass(w.category, SpectralMonitorWarning)]
    return [plain(m) for m in spectral.measurements], said


def resume(way: str, network: str, folder: str, lose: str = "") -> dict[str, Any]:
    """A run of six steps, and one that is stopped after three and resumed; a file may be lost in between."""
    place = Path(folder)
    through, _ = run(way, network, str(place / "through"))
    run(way, network, str(place / "stopped"), stop=3)
    dist.barrier()
    if lose and dist.get_rank() == 0:
        (place / "stopped" / "checkpoint-3" / lose).unlink()
    dist.barrier()
    resumed, said = run(way, network, str(place / "stopped"), resume=True)
    return {"through": through, "resumed": resumed, "said": said}
