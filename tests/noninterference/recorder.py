"""Everything a training run has and leaves behind, read after every batch, to be compared bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor, nn
from torch.optim import Optimizer

TORCH_OWN = frozenset(vars(nn.Module()))  # flags, hooks and tables, recorded one by one
MODULE_HOOKS = tuple(key for key in vars(nn.Module()) if key.endswith("_hooks"))


class Bits(NamedTuple):
    """A tensor as it lies in memory: unlike ``==``, tells -0 from 0 and takes NaN for what it is."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, tensor: Tensor) -> Bits:
        flat = tensor.detach().to_dense().cpu().clone().reshape(-1)
        return cls(str(tensor.dtype), tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes())

    def __repr__(self) -> str:
        return f"<{self.dtype} {self.shape}>"


Record = dict[str, Any]
"""Path such as ``parameter/net.0.weight`` -> :class:`Bits` or the ``repr`` of a plain value."""


def leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Every tensor and plain value inside nested containers, generators' states included."""
    if isinstance(value, Tensor):
        yield path, Bits.of(value)
    elif isinstance(value, np.ndarray):
        yield path, Bits.of(torch.from_numpy(value))
    elif isinstance(value, Mapping):
        yield f"{path}.keys", repr(list(value))
        for key, item in value.items():
            yield from leaves(f"{path}.{key}", item)
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        yield f"{path}.length", len(value)
        for i, item in enumerate(value):
            yield from leaves(f"{path}.{i}", item)
    elif isinstance(value, (set, frozenset)):
        yield path, repr(sorted(map(repr, value)))
    elif isinstance(value, torch.Generator):
        yield path, Bits.of(value.get_state())
    elif isinstance(value, random.Random):
        yield path, repr(value.getstate())
    elif isinstance(value, np.random.Generator):
        yield path, repr(value.bit_generator.state)
    elif isinstance(value, nn.Module) and not isinstance(value, pl.LightningModule):  # held in a list, say
        for name, item in of_module(value).items():
            yield f"{path}:{name}", item
    elif isinstance(value, (str, bytes, int, float, complex, type(None), torch.dtype, torch.device)):
        yield path, repr(value)
    else:
        yield path, f"a {type(value).__qualname__}"
        if type(value).__module__ == "tests.noninterference.zoo":  # our own, whatever it is
            yield from leaves(f"{path}.", vars(value))


def of_module(module: nn.Module) -> Record:
    """Parameters, gradients, buffers, flags, plain attributes, hooks."""
    record: Record = {}
    for name, part in module.named_modules():
        for key, p in part._parameters.items():
            full = f"{name}.{key}"
            record.update(leaves(f"parameter/{full}", p))
            record.update(leaves(f"grad/{full}", None if p is None else p.grad))
            record[f"flag/{full}"] = None if p is None else p.requires_grad
            record[f"hooks/{full}"] = None if p is None else _hooks(p, "_backward_hooks", "_post_accumulate_grad_hooks")
        record.update(leaves(f"buffer/{name}", part._buffers))
        record[f"flag/{name}"] = part.training
        record[f"hooks/{name}"] = _hooks(part, *MODULE_HOOKS)
        plain = {key: value for key, value in vars(part).items() if key not in TORCH_OWN | {"_metric_attributes"}}
        record[f"plain/{name}.keys"] = repr(sorted(plain))
        for key, value in plain.items():
            record.update(leaves(f"plain/{name}.{key}", value))
    return record


def of_optimizer(optimizer: Optimizer) -> Record:
    """Groups, state of every parameter, hooks."""
    record: Record = {"hooks/optimizer": _hooks(optimizer, "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")}
    for g, group in enumerate(optimizer.param_groups):
        rest = {key: value for key, value in group.items() if key != "params"}
        record.update(leaves(f"group/{g}", rest))
        record[f"group/{g}.size"] = len(group["params"])
        for i, p in enumerate(group["params"]):
            record.update(leaves(f"optimizer/{g}.{i}", optimizer.state.get(p, {})))
    return record


def of_random() -> Record:
    """The global generators."""
    return {
        "random/torch": Bits.of(torch.get_rng_state()),
        "random/python": repr(random.getstate()),
        **dict(leaves("random/numpy", np.random.get_state())),  # noqa: NPY002
    }


def of_trainer(trainer: pl.Trainer) -> Record:
    """Optimizers, schedulers, metrics, progress."""
    record: Record = {"progress/step": trainer.global_step, "progress/epoch": trainer.current_epoch}
    for optimizer in trainer.optimizers:
        record.update(of_optimizer(optimizer))
    for i, config in enumerate(trainer.lr_scheduler_configs):
        record.update(leaves(f"scheduler/{i}", config.scheduler.state_dict()))
    for name in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
        theirs = {key: value for key, value in getattr(trainer, name).items() if not key.startswith("spectral")}
        record.update(leaves(f"log/{name}", theirs))
    record.update(leaves("progress/loop", trainer.fit_loop.state_dict()))
    return record


def _hooks(owner: Any, *names: str) -> int:
    return sum(len(getattr(owner, name, None) or ()) for name in names)


@dataclass
class Run:
    """What was recorded of one training run."""

    records: list[tuple[str, Record]] = field(default_factory=list)
    calls: list[tuple[str, Any]] = field(default_factory=list)

    def add(self, when: str, *parts: Record) -> None:
        self.records.append((when, {path: leaf for part in parts for path, leaf in part.items()}))

    def tensors(self, kind: str = "") -> int:
        """Tensors, of a kind such as ``"buffer"``, that a comparison with this run compares."""
        return sum(
            isinstance(leaf, Bits) and path.startswith(kind)
            for _, record in self.records
            for path, leaf in record.items()
        )


def differences(reference: Run, other: Run) -> list[tuple[str, str]]:
    """(when, path) of everything that is not the same in both runs, in the order of time."""
    found = []
    for (when, a), (then, b) in zip(reference.records, other.records, strict=False):
        if when != then:
            return [*found, (when, f"order/{then}")]
        found += [(when, path) for path in {**a, **b} if a.get(path, "absent") != b.get(path, "absent")]
    if len(reference.records) != len(other.records):
        found.append(("end", "order/length"))
    if reference.calls != other.calls:
        found.append(("end", "log/logger"))
    return found


def first_kinds(found: Sequence[tuple[str, str]]) -> set[str]:
    """Kinds of what differed first."""
    return {path.partition("/")[0] for when, path in found if when == found[0][0]}


class RecordingLogger(Logger):
    """Keeps what arrives, but for what the monitor sends."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.spectral: list[tuple[int | None, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "recording"

    @property
    def version(self) -> int:
        return 0

    @property
    def experiment(self) -> RecordingLogger:
        return self

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        self.run.calls.append(("hyperparams", repr((args, kwargs))))

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """Users talk to ``self.logger.experiment`` too."""
        self.run.calls.append(("add_scalar", repr((name, float(value), step))))

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        ours = {key: value for key, value in metrics.items() if key.startswith("spectral")}
        if ours:  # with the optimizer steps taken; Lightning's axis begins at 0
            self.spectral.append((None if step is None else step + 1, ours))
        rest = {key: value for key, value in metrics.items() if key not in ours}
        if rest:
            self.run.calls.append(("metrics", repr((sorted((k, float(v)) for k, v in rest.items()), step))))


class Recorder(pl.Callback):
    """Reads everything at the given moments; the hooks too, if it comes after whoever may have left some."""

    def __init__(self, run: Run, place: str, moments: Sequence[str], hooks: bool) -> None:
        self._run, self._place, self._keep_hooks = run, place, hooks
        for moment in moments:
            setattr(self, moment, self._reader(moment))

    def _reader(self, moment: str) -> Callable[..., None]:
        def read(trainer: pl.Trainer, module: pl.LightningModule, *rest: Any) -> None:
            record = {**of_module(module), **of_trainer(trainer), **of_random()}
            if moment == "on_train_batch_end":
                outputs, batch, index = rest
                record.update(leaves("batch/outputs", outputs))
                record.update(leaves("batch/batch", batch))
                record.update(leaves("batch/index", index))
            if not self._keep_hooks:
                record = {path: leaf for path, leaf in record.items() if not path.startswith("hooks/")}
            self._run.add(f"{moment}, {self._place} the monitor, batch {trainer.fit_loop.total_batch_idx}", record)

        return read


BEFORE = (
    "on_train_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)
AFTER = ("on_train_start", "on_train_batch_end", "on_validation_end", "on_train_epoch_end", "on_train_end")
