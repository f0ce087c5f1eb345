"""One point of a sweep: a network of some width, depth and seed, trained and measured."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spectral_monitor.arguments import is_number
from spectral_monitor.layers import dissect
from spectral_monitor.measurement import LayerInfo, Measurement
from spectral_monitor.monitoring.probe import SpectralProbe
from spectral_monitor.monitoring.trial_copy import optimizers_and_schedulers
from spectral_monitor.parametrization.layer_position import LayerPosition, by_parameter
from spectral_monitor.parametrization.param_groups import FAMILIES, Family
from spectral_monitor.parametrization.rules import Parametrization
from spectral_monitor.quantities import resolve
from spectral_monitor.scaling.batches import SweepError, batches, check_data, loss_of, moved, seeded
from spectral_monitor.scaling.sweeps.arguments import data_name, integers, name_of, positive
from spectral_monitor.sharding import mean_over_processes, refuse_several

MakeModule = Callable[..., nn.Module]
MakeOptimizer = Callable[[nn.Module], Optimizer]
OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}


class RunKey(NamedTuple):
    """The identity of a point; ``depth`` is ``None`` where the sweep is over widths alone."""

    width: int
    depth: int | None
    seed: int

    def __str__(self) -> str:
        depth = "" if self.depth is None else f"depth {self.depth}, "
        return f"width {self.width}, {depth}seed {self.seed}"


@dataclass(frozen=True)
class Point:
    """The result of training one network.

    Attributes:
        key: its width, depth and seed.
        measurements: of the steps that were measured, in order.
        losses: of every step, before it.
        failure: why it cannot be used, such as ``"the loss is nan at step 4"``; empty if it can.
        places: layer -> position of its parameter, by which the parametrization chose its rule; empty without one.
    """

    key: RunKey
    measurements: tuple[Measurement, ...]
    losses: tuple[float, ...]
    failure: str = ""
    places: Mapping[str, LayerPosition] = field(default_factory=dict)

    @property
    def layers(self) -> tuple[LayerInfo, ...]:
        """The layers of the network; none if nothing was measured."""
        return self.measurements[0].layers if self.measurements else ()

    def at(self, step: int) -> Measurement | None:
        """Return the measurement of a step."""
        return next((m for m in self.measurements if m.step == step), None)


@dataclass(frozen=True)
class SweepConfig:
    """Settings of training and measuring every point of a sweep; see :func:`~spectral_monitor.scaling.sweep`.

    Raises:
        ValueError: an argument does not fit; the message says what does.
    """

    make_module: MakeModule
    data: Any
    steps: int
    quantities: Sequence[str]
    measured: int | Sequence[int] | None = None
    parametrization: Parametrization | None = None
    optimizer: str | MakeOptimizer | None = None
    lr: float | None = None
    roles: Mapping[str, str] | None = None
    blocks: Mapping[str, int] | None = None
    processes_per_point: int = 1
    measured_steps: tuple[int, ...] = field(init=False)
    family: str = field(init=False)  # of the parametrization's optimizer; empty without a parametrization

    def __post_init__(self) -> None:
        if not callable(self.make_module) or isinstance(self.make_module, nn.Module):
            kind = type(self.make_module).__name__
            raise SweepError(
                f"make_module is a {kind}: give a function that makes a module of the width it is called with"
            )
        check_data(self.data)
        steps = positive("steps", self.steps)
        measured_steps = tuple(sorted({*integers((1, steps) if self.measured is None else self.measured)}))
        if not measured_steps or not all(1 <= step <= steps for step in measured_steps):
            raise SweepError(f"measured must name steps from 1 to {steps}, got {self.measured!r}")
        processes = positive("processes_per_point", self.processes_per_point)
        object.__setattr__(self, "steps", steps)
        object.__setattr__(self, "measured_steps", measured_steps)
        object.__setattr__(self, "processes_per_point", processes)
        object.__setattr__(self, "quantities", resolve(self.quantities))
        object.__setattr__(self, "family", self._family())

    def _family(self) -> str:
        """Return the family of the parametrization's optimizer; empty without a parametrization."""
        if self.parametrization is None:
            if self.lr is not None:
                raise SweepError("lr= goes with parametrization=; without one the optimizer has its own")
            if self.optimizer is not None and not callable(self.optimizer):
                raise SweepError(
                    f"optimizer={self.optimizer!r} goes with parametrization=; without one the module's "
                    "configure_optimizers is used or, from Python, a function that makes an optimizer for a module"
                )
            return ""
        if not isinstance(self.parametrization, Parametrization):
            raise SweepError(
                f"parametrization is a {type(self.parametrization).__name__}: give one of spectral_monitor.scaling's, "
                "such as MUP"
            )
        family = "sgd" if self.optimizer is None else self.optimizer
        if not isinstance(family, str) or family not in FAMILIES:
            raise SweepError(f"with parametrization=, optimizer= must be one of {', '.join(FAMILIES)}, got {family!r}")
        if not (is_number(self.lr) and 0 < self.lr < math.inf):
            raise SweepError(f"parametrization= needs lr=, a positive number, got {self.lr!r}")
        object.__setattr__(self, "lr", float(self.lr))
        return family

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that all points share, in plain types; widths, depths and seeds may be added later."""
        parametrization = None
        if self.parametrization is not None:
            rules = hashlib.sha256(repr(self.parametrization).encode()).hexdigest()[:8]
            parametrization = f"{self.parametrization.name} ({rules})"
        return {
            "make_module": name_of(self.make_module),
            "data": data_name(self.data),
            "steps": self.steps,
            "measured": list(self.measured_steps),
            "quantities": list(self.quantities),
            "parametrization": parametrization,
            "optimizer": name_of(self.optimizer) if callable(self.optimizer) else self.family or None,
            "lr": self.lr,
            "roles": dict(self.roles or {}),
            "blocks": dict(self.blocks or {}),
            **({"processes_per_point": self.processes_per_point} if self.processes_per_point > 1 else {}),
        }

    def build(self, key: RunKey) -> nn.Module:
        """Build the module of a point; it draws from the global random generators.

        Raises:
            SweepError: the factory returned something else.
        """
        module = self.make_module(key.width) if key.depth is None else self.make_module(key.width, key.depth)
        if not isinstance(module, nn.Module):
            raise SweepError(f"make_module must return a torch.nn.Module, got a {type(module).__name__}")
        return module

    def shapes(self, key: RunKey) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a point's parameters; random states stay as they are."""
        with seeded("module", key.seed):
            return {name: tuple(p.shape) for name, p in self.build(key).named_parameters()}

    def train(self, key: RunKey) -> Point:
        """Train a network and measure it; random states stay as they are.

        Raises:
            SweepError: the factory, the data or the module does not do what a sweep needs.
            RuntimeError: the user's code raised an error, which is the cause; the message names the point.
        """
        try:
            with seeded("module", key.seed), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="You are trying to `self.log")  # there is no Trainer
                return self._train(key)
        except SweepError as error:
            raise SweepError(f"{key}: {error}") from error
        except Exception as error:
            raise RuntimeError(f"{key}: {type(error).__name__}: {error}") from error

    def _train(self, key: RunKey) -> Point:
        module = self.build(key)
        positions = self._positions(module)
        optimizer, schedulers = self._optimizer(module)
        training_step = _TrainingStep(module)
        with _as_sweep_error():
            if self.processes_per_point == 1:
                refuse_several("a point of a sweep")
            probe = SpectralProbe(
                training_step,
                optimizer,
                every_n_steps=1,
                quantities=self.quantities,
                roles=self.roles,
                blocks=self.blocks,
                drift_every=1,
                history=len(self.measured_steps),
                mode="observe",
            )
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        losses: list[float] = []
        failure = ""
        with closing(batches(self.data, key.seed)) as data:  # type: ignore[type-var]  # a generator
            for step in range(1, self.steps + 1):
                batch = moved(next(data), device)
                probe.steps = step - 1  # the probe is not called in steps between measured ones
                try:
                    with probe.step() if step in self.measured_steps else nullcontext():
                        optimizer.zero_grad()
                        loss = training_step(batch, step - 1)
                        if not loss.requires_grad:
                            raise SweepError("the loss has no gradient: nothing in it can be trained")
                        losses.append(mean_over_processes(loss))
                        if not math.isfinite(losses[-1]):
                            raise _DivergedError
                        loss.backward()
                        optimizer.step()
                except _DivergedError:
                    failure = f"the loss is {losses[-1]} at step {step}"
                    break
                for scheduler, interval in schedulers:
                    if step % interval == 0:
                        scheduler.step()
        measurements = tuple(map(_without_verdicts, probe.measurements))
        missing = [step for step in self.measured_steps if step not in {m.step for m in measurements}]
        if missing and not failure:
            failure = f"step {missing[0]} could not be measured; a warning gave the reason"
        return Point(key, measurements, tuple(losses), failure, positions)

    def _positions(self, module: nn.Module) -> dict[str, LayerPosition]:
        """Return layer -> position by which the parametrization chooses its rule; none without a parametrization."""
        if self.parametrization is None:
            return {}
        with _as_sweep_error():
            anatomy = dissect(module, roles=self.roles, blocks=self.blocks)
            layers = [layer for layer in anatomy.layers if layer.compute is None]
            positions = by_parameter(module, layers)
        return {layer.info.name: positions[id(layer.sources[0])] for layer in layers}

    def _optimizer(self, module: nn.Module) -> tuple[Optimizer, list[tuple[Any, int]]]:
        """Return the optimizer of a module, and each scheduler of steps with its interval."""
        if self.parametrization is not None:
            assert self.lr is not None
            family = cast(Family, self.family)
            names: dict[str, Any] = {"roles": self.roles, "blocks": self.blocks}
            with _as_sweep_error():
                self.parametrization.init_(module, **names)
                groups = self.parametrization.param_groups(module, self.lr, family, **names)
            return OPTIMIZERS[family](groups, lr=self.lr), []
        if callable(self.optimizer):
            configuration: Any = self.optimizer(module)
        elif callable(configure := getattr(module, "configure_optimizers", None)):
            configuration = configure()
        else:
            raise SweepError(
                "there is no optimizer: set parametrization= and lr=, give the module a configure_optimizers or, from "
                "Python, pass a function that makes an optimizer for a module"
            )
        if getattr(module, "automatic_optimization", True) is False:
            raise SweepError(
                "the module uses manual optimization (automatic_optimization = False), which a sweep does not support"
            )
        return _optimizer_and_schedulers(configuration)


class _DivergedError(Exception):
    pass


@contextmanager
def _as_sweep_error() -> Iterator[None]:
    """Raise ValueErrors of our own code as SweepError, to tell them from errors of the user's code."""
    try:
        yield
    except ValueError as error:
        raise SweepError(str(error)) from error


class _TrainingStep(nn.Module):
    """The way from a batch to the loss as one call of a module; layers keep their names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._checkpoint_wrapped_module = module  # a name that the anatomy knows as a wrapper's

    def forward(self, batch: Any, index: int) -> Tensor:
        """Return the loss of a batch.

        Raises:
            SweepError: it is not a scalar.
        """
        module = self._checkpoint_wrapped_module
        loss = loss_of(module, batch, index)
        if not isinstance(loss, Tensor) or loss.ndim:
            kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            function = "training_step" if callable(getattr(module, "training_step", None)) else "the module"
            raise SweepError(
                f"{function} returned {kind}: a sweep trains on a scalar loss, from module.training_step(batch, i) if "
                "there is one, else from module(*batch)"
            )
        return loss


def _optimizer_and_schedulers(configuration: Any) -> tuple[Optimizer, list[tuple[Any, int]]]:
    """Return the optimizer, and each scheduler of steps with its interval, from what Lightning takes."""
    optimizers, schedulers = optimizers_and_schedulers(configuration)
    if len(optimizers) != 1:
        raise SweepError(f"a sweep trains with one optimizer, got {len(optimizers)}")
    (optimizer,) = optimizers
    if not isinstance(optimizer, Optimizer):
        raise SweepError(f"a sweep needs a torch.optim.Optimizer, got a {type(optimizer).__name__}")
    of_steps = [s for s in schedulers if isinstance(s, Mapping) and s.get("interval") == "step"]
    return optimizer, [(s["scheduler"], s.get("frequency", 1)) for s in of_steps]


def _without_verdicts(measurement: Measurement) -> Measurement:
    """Return a measurement without verdicts, because a sweep has its own, and without timings of this machine."""
    summary = {key: value for key, value in measurement.summary.items() if key not in ("overhead_ms", "violations")}
    return Measurement(measurement.step, measurement.layers, measurement.values, summary, reasons=measurement.reasons)
