"""A training run that recipes build, faults change and the benchmark watches."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spectral_monitor import Measurement, SpectralProbe
from spectral_monitor.condition.optimizers.hyperparameters import Hyperparameters, hyperparameters

Schedule = Callable[[int], float]
"""Step, counted from 0 -> what every group's learning rate is multiplied by."""


_made: list[torch.Generator] = []
"""Generators of the recipe that is being built."""


def batches(seed: int) -> torch.Generator:
    """Make a generator that batches are drawn from, apart from the one of the weights."""
    _made.append(torch.Generator().manual_seed(seed))
    return _made[-1]


def _taken() -> list[torch.Generator]:
    generators = list(_made)
    _made.clear()
    return generators


@dataclass
class Run:
    """A model in training, with everything that a fault may change.

    Attributes:
        model: what is measured.
        optimizers: stepped one after the other, once per step.
        loss: the training loss of a fresh batch.
        evaluate: the loss on fixed data, without dropout; the figure that a run is judged by.
        steps: optimizer steps of the whole run.
        schedule: of the learning rates, over the whole run.
        clip: largest norm of all gradients together; ``None`` for none.
        zero_grad: whether gradients are cleared before every backward pass.
        repeats: optimizer steps taken with each batch's gradients; 1 is right.
        update: what happens in a step, for recipes that are not ``loss().backward()`` and ``step()``; given the run.
        roles: as in ``SpectralMonitor(roles=...)``; empty where no user would have to say anything.
        generators: that batches are drawn from.
    """

    model: nn.Module
    optimizers: list[Optimizer]
    loss: Callable[[], Tensor]
    evaluate: Callable[[], float]
    steps: int
    schedule: Schedule = lambda step: 1.0
    clip: float | None = None
    zero_grad: bool = True
    repeats: int = 1
    update: Callable[[Run], None] | None = None
    after_step: Callable[[], None] = lambda: None
    roles: dict[str, str] = field(default_factory=dict)
    generators: list[torch.Generator] = field(default_factory=_taken)

    def parameters(self, pattern: str) -> list[tuple[str, nn.Parameter]]:
        """Parameters whose name matches an fnmatch pattern.

        Raises:
            ValueError: there are none.
        """
        matches = [(name, p) for name, p in self.model.named_parameters() if fnmatchcase(name, pattern)]
        if not matches:
            raise ValueError(f"no parameter matches {pattern!r}: {[n for n, _ in self.model.named_parameters()]}")
        return matches

    def scale_rate(self, pattern: str, factor: float) -> None:
        """Multiply the learning rate of some parameters, each former group's in a new group of its own."""
        chosen = {id(p) for _, p in self.parameters(pattern)}
        for optimizer in self.optimizers:
            for group in list(optimizer.param_groups):
                moved = [p for p in group["params"] if id(p) in chosen]
                if not moved:
                    continue
                if len(moved) == len(group["params"]):
                    group["lr"] = group["lr"] * factor
                    continue
                group["params"] = [p for p in group["params"] if id(p) not in chosen]
                rest = {key: value for key, value in group.items() if key not in ("params", "lr", "initial_lr")}
                optimizer.add_param_group({"params": moved, "lr": group["lr"] * factor, **rest})

    def set_rate(self, layer: str, rate: float) -> None:
        """Give the parameters of a layer a learning rate, in a group of their own."""
        for name, p in self.model.named_parameters():
            if name == layer or name.startswith(f"{layer}."):
                group = next((g for g in self.groups() if any(q is p for q in g["params"])), None)
                if group is not None and group["lr"] > 0:
                    self.scale_rate(name, rate / group["lr"])
                elif group is not None:
                    group["lr"] = rate

    def scale_rates(self, factor: float) -> None:
        """Multiply every learning rate."""
        for group in self.groups():
            group["lr"] = group["lr"] * factor

    def scale_weight(self, pattern: str, factor: float) -> None:
        """Multiply some weights."""
        with torch.no_grad():
            for _, p in self.parameters(pattern):
                p.mul_(factor)

    def set_option(self, **options: object) -> None:
        """Set options of every group that has them, such as ``eps`` or ``momentum``.

        Raises:
            ValueError: no group has such an option.
        """
        for key, value in options.items():
            groups = [group for group in self.groups() if key in group]
            if not groups:
                raise ValueError(f"no optimizer has an option {key!r}")
            for group in groups:
                group[key] = value

    def groups(self) -> Iterator[dict]:
        for optimizer in self.optimizers:
            yield from optimizer.param_groups

    def next_loss(self) -> Callable[[], Tensor]:
        """Return a function that computes the loss of the next batch, whenever it is called, and draws none."""
        states = [generator.get_state() for generator in self.generators]

        def loss() -> Tensor:
            now = [generator.get_state() for generator in self.generators]
            _set(self.generators, states)
            try:
                return self.loss()
            finally:
                _set(self.generators, now)

        return loss

    def step(self) -> Tensor | None:
        """One step of the training loop, at the learning rates of now."""
        if self.update is not None:
            self.update(self)
            return None
        if self.zero_grad:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        self.clip_gradients()
        for _ in range(self.repeats):
            for optimizer in self.optimizers:
                optimizer.step()
        return loss

    def clip_gradients(self) -> None:
        if self.clip is not None:
            nn.utils.clip_grad_norm_([p for group in self.groups() for p in group["params"]], self.clip)


def _set(generators: Sequence[torch.Generator], states: Sequence[Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


@dataclass(frozen=True)
class Record:
    """What a run left behind.

    Attributes:
        measurements: all of them.
        settings: of every measurement, what the judge is told of the optimizers.
        tied: layer -> layer that counts its parameters.
        begin, end: :attr:`Run.evaluate` before the first and after the last step; inf for NaN.
        steps: taken; fewer than planned if parameters became NaN or inf.
    """

    measurements: Sequence[Measurement]
    settings: Sequence[dict[str, Hyperparameters]]
    begin: float
    end: float
    steps: int
    tied: dict[str, str]


DEFAULT = "1, 2, 4, ..., every 100"


def train(run: Run, *, every: int | str = DEFAULT, mode: str = "observe", steps: int | None = None) -> Record:
    """Train to the end, measuring as the monitor does by default; stop where nothing can come any more."""
    probe = SpectralProbe(
        run.model, run.optimizers, every_n_steps=every, quantities="standard", mode=mode, roles=run.roles or None
    )
    begin = finite(run.evaluate())
    base = [group["lr"] for group in run.groups()]
    for group in run.groups():
        group["initial_lr"] = group["lr"]  # as torch's schedulers do
    settings: list[dict[str, Hyperparameters]] = []
    layers = probe.anatomy.layers
    taken = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(steps or run.steps):
            factor = run.schedule(step)
            for group, lr in zip(run.groups(), base, strict=True):
                group["lr"] = lr * factor
            with probe.step():
                loss = run.step()
                if loss is not None:
                    probe.report_loss(loss)
            run.after_step()
            taken = step + 1
            if len(probe.measurements) > len(settings):
                settings.append(hyperparameters(layers, run.optimizers))
    for group, lr in zip(run.groups(), base, strict=True):
        group["lr"] = lr
    tied = {layer.info.name: layer.tied_to for layer in layers if layer.tied_to}
    return Record(tuple(probe.measurements), tuple(settings), begin, finite(run.evaluate()), taken, tied)


def finite(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


def warmup_cosine(steps: int, warmup: float = 0.1, floor: float = 0.0) -> Schedule:
    """Linear warm-up over a share of the steps, then half a cosine down to a floor."""
    rise = max(1, round(warmup * steps))

    def factor(step: int) -> float:
        if step < rise:
            return (step + 1) / rise
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))

    return factor


def cosine(steps: int) -> Schedule:
    """Half a cosine from 1 to 0."""
    return lambda step: 0.5 * (1 + math.cos(math.pi * step / steps))
