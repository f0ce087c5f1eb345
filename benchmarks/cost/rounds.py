"""Ratios of time: steps of one real Lightning run that take turns plain and watched, compared within each round.

Plain steps and those of all contestants follow one another in one Trainer, and each is compared with the plain step
right before it, so that a machine whose speed drifts does not distort the ratios.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol
from unittest.mock import patch

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from tqdm.auto import tqdm

PLAIN = "plain"
BATCH_HOOKS = (
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
"""Of a training batch, besides its start and its end."""


class Training(Protocol):
    """What is trained."""

    def start(self, text: str | None) -> tuple[pl.LightningModule, Any]:
        """A new model and its data, the same at every call."""


@dataclass(frozen=True)
class Device:
    """Where is trained, and in which precision."""

    name: str = "cpu"
    precision: str = "32-true"

    def trainer(self, **settings: Any) -> pl.Trainer:
        """A Trainer that does nothing else."""
        accelerator = "gpu" if self.name == "cuda" else "cpu"
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_model_summary", "enable_progress_bar"), False)
        return pl.Trainer(accelerator=accelerator, devices=1, precision=self.precision, **quiet, **settings)  # type: ignore[arg-type]

    def wait(self) -> None:
        """Until all that was queued is done."""
        if self.name == "cuda":
            torch.cuda.synchronize()


class Turns(Callback):
    """Gives every step to one contestant, or to none, and times it.

    Contestants are callbacks. Hooks of the fit go to all of them; those of a batch to the one whose turn it is.

    Attributes:
        seconds: of each step.
        hook_seconds: of them, in the contestant's start and end of the batch.
    """

    def __init__(self, contestants: Mapping[str, Callback], plan: Sequence[str], device: Device, title: str) -> None:
        self.contestants, self.plan, self.device = contestants, plan, device
        self.seconds: list[float] = []
        self.hook_seconds: list[float] = []
        self._begin = self._in_hooks = 0.0
        self._bar = tqdm(total=len(plan), desc=title, leave=False, disable=None)
        for hook in ("setup", "on_fit_start", "on_train_start", "teardown"):
            setattr(self, hook, self._to_all(hook))
        for hook in BATCH_HOOKS:
            setattr(self, hook, self._to_one(hook))

    @property
    def turn(self) -> Callback | None:
        """Whose it is."""
        return self.contestants.get(self.plan[len(self.seconds)]) if len(self.seconds) < len(self.plan) else None

    def _to_all(self, hook: str) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            for contestant in self.contestants.values():
                getattr(contestant, hook)(*args, **kwargs)

        return call

    def _to_one(self, hook: str) -> Callable[..., None]:
        def call(*args: Any) -> None:
            if self.turn is not None:
                getattr(self.turn, hook)(*args)

        return call

    @contextmanager
    def _clocked(self) -> Any:
        begin = time.perf_counter()
        yield
        self._in_hooks += time.perf_counter() - begin

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self._in_hooks = 0.0
        enter = getattr(self.turn, "enter", None)
        if enter is not None:
            enter(pl_module)
        self.device.wait()
        self._begin = time.perf_counter()
        if self.turn is not None:
            with self._clocked():
                self.turn.on_train_batch_start(trainer, pl_module, *args)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        turn = self.turn
        if turn is not None:
            with self._clocked():
                turn.on_train_batch_end(trainer, pl_module, *args)
        self.device.wait()
        self.seconds.append(time.perf_counter() - self._begin)
        self.hook_seconds.append(self._in_hooks)
        leave = getattr(turn, "leave", None)
        if leave is not None:
            leave(pl_module)
        self._bar.update()

    def close(self) -> None:
        """The bar is done."""
        self._bar.close()


@dataclass
class Timing:
    """Of one contestant.

    Attributes:
        before: seconds of the plain steps right before its own.
        own: seconds of its steps.
        hooks: seconds in its own start and end of a batch.
    """

    before: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    hooks: list[float] = field(default_factory=list)

    def row(self, hooks_alone: bool = False) -> dict[str, Any]:
        """For a file; ``hooks_alone`` for what costs far less than whole steps differ from each other."""
        pairs = list(zip(self.before, self.own, self.hooks, strict=True))
        extra = [hooks if hooks_alone else own - before for before, own, hooks in pairs]
        ratios = [1 + extra_seconds / before for extra_seconds, before in zip(extra, self.before, strict=True)]
        return {
            "ratio": statistics.median(ratios),
            "mean": statistics.fmean(ratios),
            "low": min(ratios),
            "high": max(ratios),
            "extra": statistics.median(extra),
            "rounds": len(ratios),
        }


Part = tuple[int, int]
"""The first and the last round a contestant takes part in; round 0 warms up and does not count."""


def plan_of(parts: Mapping[str, Part]) -> list[tuple[str, bool]]:
    """Whose step it is, and whether it counts; before each contestant's step a plain one."""
    plan = [(PLAIN, False)]
    for number in range(max(last for _, last in parts.values()) + 1):
        for name, (first, last) in parts.items():
            if first <= number <= last:
                plan += [(PLAIN, number > 0), (name, number > 0)]
    return plan


def fit(
    size: Training,
    contestants: Mapping[str, Callback],
    plan: Sequence[str],
    device: Device,
    text: str | None,
    title: str,
) -> Turns:
    """Train as many steps as planned."""
    model, data = size.start(text)
    turns = Turns(contestants, plan, device, title)
    trainer = device.trainer(max_steps=len(plan), max_epochs=-1, callbacks=[turns])
    with warnings.catch_warnings(), open(os.devnull, "w") as nowhere, patch.object(sys, "stdout", nowhere):
        warnings.simplefilter("ignore")
        trainer.fit(model, data)
    turns.close()
    if len(turns.seconds) != len(plan):
        raise RuntimeError(f"{title}: {len(turns.seconds)} steps were taken of {len(plan)}")
    gc.collect()
    return turns


def measure(
    size: Training,
    contestants: Mapping[str, Callback],
    parts: Mapping[str, Part],
    device: Device,
    text: str | None = None,
    title: str = "",
) -> tuple[float, dict[str, Timing]]:
    """Seconds of a plain step (median), and what came out for each contestant."""
    plan = plan_of({name: parts[name] for name in contestants})
    turns = fit(size, contestants, [name for name, _ in plan], device, text, title)
    timings = {name: Timing() for name in contestants}
    plain = []
    for k, (name, counts) in enumerate(plan):
        if counts and name != PLAIN:
            plain.append(turns.seconds[k - 1])
            timings[name].before.append(turns.seconds[k - 1])
            timings[name].own.append(turns.seconds[k])
            timings[name].hooks.append(turns.hook_seconds[k])
    return statistics.median(plain), timings


def measure_interval(
    size: Training, monitor: Callback, every: int, pairs: int, device: Device, text: str | None, title: str
) -> list[float]:
    """Time of ``every`` steps with a monitor, one of them measured, to that of as many plain ones before them."""
    name = "monitor"
    plan = ([PLAIN] * every + [name] * every) * (pairs + 1)
    turns = fit(size, {name: monitor}, plan, device, text, title)
    sums = [sum(turns.seconds[k : k + every]) for k in range(0, len(plan), every)]
    return [own / plain for plain, own in zip(sums[2::2], sums[3::2], strict=True)]
