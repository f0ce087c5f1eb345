"""Planted faults: does the spectral condition name the right layer and the right cause, and leave healthy runs alone?

    python -m benchmarks.rates.faults          # every fault, then every healthy run, with three seeds
    python -m benchmarks.rates.faults --quick  # every fault, in narrow models: under a minute

A fault is a healthy task with one thing wrong. ``FAULTS`` can be imported, for instance to see what a
learning-rate correction makes of them.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.rates.tuned import DATA, TASKS, Rule, Run, start, train
from spectral_monitor import Measurement
from spectral_monitor.condition import NETWORK


@dataclass(frozen=True)
class Fault:
    """A task with one thing wrong.

    Attributes:
        task: name of the healthy task.
        layers: those that must be named, or the network; the verdict on the first is the one whose cause counts.
        cause: code of the cause.
        plant: what is done to the weights.
        rule: name and parameter -> what its learning rate is multiplied by.
        width: of the model, where the task's is too narrow for the fault to show.
        every: steps between measurements; 1 where the fault mends or kills the run within a few.
    """

    name: str
    task: str
    layers: tuple[str, ...]
    cause: str
    plant: Callable[[nn.Module], None] = lambda model: None
    rule: Rule = lambda name, parameter: 1.0
    width: int | None = None
    every: int = 5


def scaled(layer: str, factor: float) -> Callable[[nn.Module], None]:
    def plant(model: nn.Module) -> None:
        with torch.no_grad():
            model.get_submodule(layer).weight.mul_(factor)

    return plant


def closed(layer: str, weight: float, bias: float) -> Callable[[nn.Module], None]:
    """A layer whose ReLU never opens."""

    def plant(model: nn.Module) -> None:
        with torch.no_grad():
            model.get_submodule(layer).weight.mul_(weight)
            model.get_submodule(layer).bias.fill_(bias)

    return plant


def faster(layer: str, factor: float) -> Rule:
    return lambda name, parameter: factor if name.rpartition(".")[0] == layer else 1.0


def everywhere(factor: float) -> Rule:
    return lambda name, parameter: factor


def sgd_rule(name: str, parameter: nn.Parameter) -> float:
    return parameter.shape[0] / parameter.shape[1] if parameter.ndim == 2 else 1.0


def ntk_rule(name: str, parameter: nn.Parameter) -> float:
    return 256 / parameter.shape[1] if parameter.ndim == 2 else 1.0


class Scaled(nn.Linear):
    """The neural tangent parametrization: entries of size 1, divided by the root of the inputs in the forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight / self.in_features**0.5, self.bias)


def tangent(model: nn.Module) -> None:
    for layer in model.layers:
        layer.__class__ = Scaled
        nn.init.normal_(layer.weight)


MLP_ADAM, MLP_SGD, CONV, LM, RES = TASKS
FAULTS = {
    fault.name: fault
    for fault in (
        Fault("hidden lr x100", MLP_ADAM, ("layers.1",), "lr_too_large", rule=faster("layers.1", 100)),
        Fault("hidden lr /100", LM, ("blocks.1.fc",), "lr_too_small", rule=faster("blocks.1.fc", 0.01)),
        Fault("conv lr x100", CONV, ("convs.2",), "lr_too_large", rule=faster("convs.2", 100)),
        Fault("hidden lr x100, SGD", MLP_SGD, ("layers.2",), "lr_too_large", rule=faster("layers.2", 100)),
        Fault("readout lr x30", LM, ("head",), "lr_too_large", rule=faster("head", 30)),
        Fault("rule of SGD under Adam", MLP_ADAM, (NETWORK,), "sgd_rule_under_adam", rule=sgd_rule, width=1024),
        Fault(
            "rule of SGD under AdamW",
            RES,
            (NETWORK,),
            "sgd_rule_under_adam",
            rule=sgd_rule,
            width=512,
        ),
        Fault("rates of NTP under SGD", MLP_SGD, (NETWORK,), "ntk_scaling", rule=ntk_rule, width=1024),
        Fault("NTK-scaled model", MLP_SGD, (NETWORK,), "ntk_scaling", plant=tangent, rule=everywhere(64), width=1024),
        Fault("readout init x30", MLP_ADAM, ("layers.3",), "readout_init", plant=scaled("layers.3", 30)),
        Fault("biases at -100", MLP_ADAM, ("layers.1",), "dead", plant=closed("layers.1", 1, -100)),
        Fault("layer zeroed", MLP_SGD, ("layers.1",), "dead", plant=closed("layers.1", 0, 0)),
        Fault("frozen by lr 0", LM, ("blocks.0.proj",), "lr_zero", rule=faster("blocks.0.proj", 0)),
        Fault("hidden init x30", RES, ("out.1",), "weights_too_large", plant=scaled("out.1", 30)),
        Fault(
            "hidden init x30, SGD", MLP_SGD, ("layers.1",), "weights_too_large", plant=scaled("layers.1", 30), every=1
        ),
        Fault("embedding x100", LM, ("tok",), "embedding_scale", plant=scaled("tok", 100)),
        Fault("embedding /1000", LM, ("tok",), "embedding_scale", plant=scaled("tok", 1e-3), every=1),
        Fault("all rates x1000", RES, (NETWORK,), "rates_too_large", rule=everywhere(1000), every=1),
    )
}


def begin(fault: Fault, data: Path = DATA, *, seed: int = 0, narrow: bool = False) -> Run:
    """A faulty run; ``narrow``: no wider than 512."""
    task = TASKS[fault.task]
    width = min(fault.width or task.width, 512) if narrow else fault.width
    return start(task, data, seed=seed, plant=fault.plant, rule=fault.rule, width=width)


@dataclass(frozen=True)
class Named:
    """The first verdict on a layer, or on the network: what a user is told.

    Attributes:
        at: measurement, from 1.
        root: layer that this one follows from; empty if it is a root.
    """

    cause: str
    at: int
    sentence: str
    root: str = ""


def named(measurements: list[Measurement]) -> dict[str, Named]:
    """Return every layer that was named, or the network, and how first, or how it was first named as a root."""
    names: dict[str, Named] = {}
    for at, measurement in enumerate(measurements, 1):
        for verdict in measurement.verdicts:
            for layer in verdict.layers or (verdict.layer,):
                if layer not in names or (names[layer].root and verdict.is_root):
                    names[layer] = Named(verdict.cause, at, verdict.sentence, verdict.root)
    return names


def examine(fault: Fault, data: Path = DATA, *, seed: int = 0, narrow: bool = False) -> dict[str, Named]:
    """Return who is named within the first 20 measurements."""
    run = begin(fault, data, seed=seed, narrow=narrow)
    return named(train(run, 20 * fault.every, fault.every)[0])


def is_found(fault: Fault, names: dict[str, Named]) -> bool:
    """Return whether every layer at fault was named, the first with the right cause."""
    return all(layer in names for layer in fault.layers) and names[fault.layers[0]].cause == fault.cause


def extremes(measurements: list[Measurement]) -> dict[str, tuple[float, float, float]]:
    """Quantity and role -> smallest and largest value over its reference, and the factor to the nearest limit."""
    ranges: dict[str, tuple[float, float, float]] = {}
    for measurement in measurements:
        for quantity, limits in measurement.bands.items():
            for info, value, (low, high, reference) in zip(
                measurement.layers, measurement.values[quantity].tolist(), limits.tolist(), strict=True
            ):
                if not value > 0 or math.isnan(low):
                    continue
                ratio = value if math.isnan(reference) else value / reference
                least, largest, margin = ranges.get(f"{quantity}, {info.role}", (math.inf, 0.0, math.inf))
                margin = min(margin, high / value, value / low if low > 0 else math.inf)
                ranges[f"{quantity}, {info.role}"] = min(least, ratio), max(largest, ratio), margin
    return ranges


def print_faults(data: Path, narrow: bool) -> int:
    """The table of faults; how many were not found."""
    row = "{:5}  {:24}  {:26}  {:16}  {:20}  {:>3}  {}"
    print(row.format("", "fault", "task", "layer", "cause", "at", "also named"))
    missed = 0
    for fault in FAULTS.values():
        everyone = examine(fault, data, narrow=narrow)
        others = {layer: name for layer, name in everyone.items() if layer not in fault.layers}
        first = everyone.get(fault.layers[0], Named("-", 0, ""))
        missed += not is_found(fault, everyone)
        outcome = "found" if is_found(fault, everyone) else "NOT"
        listed = ", ".join(
            f"{layer} ({other.cause}{', follows' if other.root else ''})" for layer, other in others.items()
        )
        print(
            row.format(outcome, fault.name, fault.task, fault.layers[0], first.cause, first.at, listed).rstrip(),
            flush=True,
        )
    return missed


def print_healthy(data: Path, seeds: int) -> int:
    """The table of healthy runs; how many of them had a verdict."""
    row = "{:26}  {:18}  {:>8} .. {:<8}  {:>5}"
    print(row.format("healthy task", "check", "ratio", "", "room"))
    alarms = 0
    for task in TASKS.values():
        ranges: dict[str, tuple[float, float, float]] = {}
        for seed in range(seeds):
            run = start(task, data, seed=seed)
            measurements, _ = train(run, task.steps, 1)
            everyone = named(measurements)
            alarms += bool(everyone)
            for layer, name in everyone.items():
                print(f"NAMED {task.name}, seed {seed}: {layer} at {name.at}: {name.sentence}")
            for key, (low, high, margin) in extremes(measurements[task.steps // 10 :]).items():
                previous = ranges.get(key, (math.inf, 0.0, math.inf))
                ranges[key] = min(previous[0], low), max(previous[1], high), min(previous[2], margin)
        for key, (low, high, margin) in ranges.items():
            print(row.format(task.name, key, f"{low:.2g}", f"{high:.2g}", f"{margin:.2f}"), flush=True)
    return alarms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="folder with cifar10_small.npz and tinyshakespeare.txt")
    parser.add_argument("--quick", action="store_true", help="faults only, in narrow models")
    parser.add_argument("--seeds", type=int, default=3, help="healthy runs of each task")
    args = parser.parse_args()
    torch.set_num_threads(1)
    missed = print_faults(args.data, args.quick)
    alarms = 0 if args.quick else print_healthy(args.data, args.seeds)
    print(f"{len(FAULTS) - missed} of {len(FAULTS)} faults found" + ("" if args.quick else f"; {alarms} false alarms"))


if __name__ == "__main__":
    main()
