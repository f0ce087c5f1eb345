"""A training loop with a monitor, and the same loop without one."""

from __future__ import annotations

import copy
import io
import math
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from spectral_monitor import LRCorrection, SpectralMonitorWarning, SpectralProbe
from spectral_monitor.measurement import Measurement
from tests.noninterference.recorder import Record, leaves, of_module, of_optimizer, of_random

LAYERS = ("first", "again", "last")
PLACES = ("forward", "backward", "optimizer", "sink")
ROWS, INPUTS, WIDTH, CLASSES = 6, 5, 7, 3


class BoomError(Exception):
    pass


class Passes(torch.autograd.Function):
    """The identity, that fails in its backward pass where its owner is told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: str) -> Tensor:
        ctx.place = place
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.place == "backward":
            raise BoomError("backward")
        return gradient, None


class Net(nn.Module):
    """Draws, keeps statistics, calls one layer twice, and fails where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(INPUTS, WIDTH), nn.BatchNorm1d(WIDTH)
        self.again, self.dropout, self.last = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Linear(WIDTH, CLASSES)
        self.place = ""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x)).relu()
        h = h + self.dropout(self.again(h))
        if self.place == "forward":
            raise BoomError("forward")
        h = h + self.again(Passes.apply(h, self.place)).tanh()
        return self.last(h)


class Adam(torch.optim.AdamW):
    """Fails, once it has stepped, where it is told to."""

    place = ""

    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:
        loss = super().step(closure)
        if self.place == "optimizer":
            raise BoomError("optimizer")
        return loss


class Fragile:
    """Fails to take measurements where it is told to."""

    place = ""

    def write(self, measurement: Measurement) -> None:
        if self.place == "sink":
            raise BoomError("sink")

    def close(self) -> None:
        raise BoomError("close")


@dataclass
class Saved:
    """A checkpoint as it is read from a disk, and what the script that goes on has to know."""

    states: dict[str, Any]
    pruned: tuple[str, ...]
    frozen: tuple[str, ...]
    randomness: tuple[Any, ...]
    steps: int


def randomness() -> tuple[Any, ...]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002


def set_randomness(state: tuple[Any, ...]) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])  # noqa: NPY002


@dataclass
class Loop:
    """A loop; with ``options``, one that a probe of these settings watches."""

    options: dict[str, Any] | None = None
    second: SpectralProbe | None = None
    said: list[str] = field(default_factory=list)
    steps: int = 0

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        self.sink = Fragile()
        self.build((), ())
        self.watch()
        self.randomness = randomness()

    def build(self, pruned: Sequence[str], frozen: Sequence[str]) -> None:
        """Make the model, the optimizer and the scaler, as a script does when it starts."""
        self.model, self.second, self.probe = Net(), None, None
        # Before pruning gives weights another place among the parameters, as it was when training began.
        self.optimizer = Adam(self.model.parameters(), lr=0.01)
        for name in pruned:
            prune.identity(getattr(self.model, name), "weight")
        for name in frozen:
            getattr(self.model, name).requires_grad_(False)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=3)

    def watch(self) -> None:
        if self.options is not None:
            self.probe = SpectralProbe(
                self.model, self.optimizer, sinks=[self.sink], **({"every_n_steps": 1} | self.options)
            )

    @contextmanager
    def alone(self) -> Iterator[None]:
        """With this loop's own random numbers; what the monitor warns of is kept."""
        set_randomness(self.randomness)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", SpectralMonitorWarning)
            yield
        self.said += [str(w.message) for w in caught if issubclass(w.category, SpectralMonitorWarning)]
        self.randomness = randomness()

    def step(self, seed: int, kind: str = "plain", place: str = "", overflow: bool = False, look: bool = False) -> str:
        """Take one step of training, and return where it failed."""
        generator = torch.Generator().manual_seed(seed)
        micro = [torch.randn(ROWS, INPUTS, generator=generator) for _ in range(2 if kind == "accumulated" else 1)]
        targets = [torch.randint(0, CLASSES, (ROWS,), generator=generator) for _ in micro]
        if overflow:
            micro[-1] = micro[-1] * math.inf
        self.model.place = self.optimizer.place = self.sink.place = place
        self.steps += 1
        failed = ""
        with self.watched(len(micro)) as watched:
            try:
                with watched:
                    self.train(list(zip(micro, targets, strict=True)), kind, look)
            except BoomError as error:
                failed = str(error)
        self.model.place = self.optimizer.place = self.sink.place = ""
        return failed

    @contextmanager
    def watched(self, accumulated: int) -> Iterator[Any]:
        second = nullcontext() if self.second is None else self.second.step(accumulated=accumulated)
        with self.alone():
            first = nullcontext() if self.probe is None else self.probe.step(accumulated=accumulated)
            yield _both(first, second)

    def train(self, batches: Sequence[tuple[Tensor, Tensor]], kind: str, look: bool) -> None:
        self.optimizer.zero_grad()

        def backward() -> Tensor:
            for x, y in batches:
                loss = nn.functional.cross_entropy(self.model(x), y) / len(batches)
                (self.scaler.scale(loss) if kind == "scaled" else loss).backward()
            return loss

        if kind == "closure":
            self.optimizer.step(backward)
            return
        backward()
        if look:  # as a script that looks at its validation loss before the step is over
            self.evaluate()
        if kind == "scaled":
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.model(torch.randn(4, INPUTS))
        self.model.train()

    def leave_open(self) -> None:
        """Begin a step that nobody ends, as a callback does whose trainer was interrupted."""
        if self.probe is not None:
            self.probe.begin_step()
        self.steps += 1
        nn.functional.cross_entropy(self.model(torch.randn(ROWS, INPUTS)), torch.zeros(ROWS).long()).backward()

    def save(self) -> Saved:
        states = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        states |= {"scaler": self.scaler.state_dict()}
        if self.probe is not None:
            states["probe"] = self.probe.state_dict()
        buffer = io.BytesIO()
        torch.save(states, buffer)
        buffer.seek(0)
        pruned = tuple(name for name in LAYERS if prune.is_pruned(getattr(self.model, name)))
        frozen = tuple(name for name in LAYERS if not next(getattr(self.model, name).parameters()).requires_grad)
        return Saved(torch.load(buffer, weights_only=True), pruned, frozen, self.randomness, self.steps)

    def resume(self, saved: Saved, probe_first: bool) -> None:
        """Start again, as a script does, from a checkpoint; the probe is made before it is loaded, or after."""
        states = copy.deepcopy(saved.states)
        with self.alone():
            self.build(saved.pruned, saved.frozen)
            if probe_first:
                self.watch()
            for key in ("model", "optimizer", "scaler"):
                getattr(self, key).load_state_dict(states[key])
            if not probe_first:
                self.watch()
            if self.probe is not None:
                self.probe.load_state_dict(states["probe"])
            self.steps = saved.steps
        self.randomness = saved.randomness

    def record(self) -> Record:
        """Everything that training has and goes on from."""
        set_randomness(self.randomness)
        scaler = dict(leaves("scaler", self.scaler.state_dict()))
        return {**of_module(self.model), **of_optimizer(self.optimizer), **scaler, **of_random()}

    def weights(self) -> dict[str, Tensor]:
        """Return the weight of each layer as it is used, in float64."""
        found = {}
        for name in LAYERS:
            layer = getattr(self.model, name)
            pruned = prune.is_pruned(layer)
            found[name] = (layer.weight_orig * layer.weight_mask if pruned else layer.weight).detach().double().clone()
        return found


@contextmanager
def _both(first: Any, second: Any) -> Iterator[None]:
    with first, second:
        yield


#: A correction that multiplies every learning rate by 1: everything of it runs, and nothing may change.
OBSERVED = {"mode": "correct", "correction": LRCorrection("balance", limits=(1.0, 1.0))}
