"""The parts of the benchmark, each a function that returns plain data for docs/cost.json."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from tqdm.auto import tqdm

from benchmarks.cost import writing as logging_cost
from benchmarks.cost.machine import available, copy_bandwidth
from benchmarks.cost.models import GPU, HEADLINE, QUICK, SERIES, Compiled, Size
from benchmarks.cost.peers import PEERS
from benchmarks.cost.rounds import Device, Part, Timing, Training, measure, measure_interval
from benchmarks.cost.vision import MODELS, Images
from benchmarks.counting import scaling
from benchmarks.counting.counts import Counts, count
from spectral_monitor import SpectralMonitor
from spectral_monitor.reporting.content.essentials import essentials

UNMEASURED = "an unmeasured step"
FROBENIUS = "Frobenius norms alone"
LIGHT, STANDARD, FULL = 'tier `"light"`', 'tier `"standard"`', 'tier `"full"`'
REPLAY = 'tier `"standard"`, `replay_samples=2`'
WHOLE_BATCH = 'tier `"standard"`, `replay_samples=None`'
SETTINGS: dict[str, dict[str, Any]] = {
    UNMEASURED: {"every_n_steps": 1_000_000_000},
    FROBENIUS: {"quantities": ["weight_fro", "update_fro", "drift_fro_ratio", "contribution"]},
    LIGHT: {"quantities": "light"},
    REPLAY: {"quantities": "standard", "replay_samples": 2},
    STANDARD: {"quantities": "standard"},
    WHOLE_BATCH: {"quantities": "standard", "replay_samples": None},
    FULL: {"quantities": "full"},
}
"""Ways to use the monitor, the cheapest first."""
COUNTED = (LIGHT, REPLAY, STANDARD, WHOLE_BATCH)
LEFT_OUT = "left out, for a step takes minutes"
"""Of tier full in a quick run, and on a GPU, where the model is large."""
FIXED = ("forwards", "operators_fixed", "read_fixed", "peak")
"""Counts that do not depend on the matrices; the others go with the steps of Lanczos."""


def monitor(name: str) -> SpectralMonitor:
    """A new one; it is asked in its own turns alone, and then measures."""
    return SpectralMonitor(**{"every_n_steps": 1} | SETTINGS[name])


def rows(timings: Mapping[str, Timing]) -> dict[str, dict[str, Any]]:
    """For a file."""
    return {name: timing.row(hooks_alone=name == UNMEASURED) for name, timing in timings.items()}


def headline(device: Device, quick: bool, text: str | None, peers: bool = True) -> dict[str, Any]:
    """The monitor and its peers on one model in one run."""
    size = GPU["headline"] if device.name == "cuda" else HEADLINE
    rounds = 3 if quick else 10
    contestants: dict[str, Callback] = {}
    parts: dict[str, Part] = {}
    skipped: dict[str, str] = {}
    for name in SETTINGS:
        if name == FULL and (quick or device.name == "cuda"):
            skipped[name] = LEFT_OUT
            continue
        contestants[name] = monitor(name)
        parts[name] = (1, 1) if name == FULL else (0, rounds)
    for name, peer in PEERS.items() if peers else ():
        if peer.missing:
            skipped[name] = peer.missing
            continue
        contestants[name] = peer.make()
        parts[name] = (1, 1) if peer.slow else (0, rounds)
    plain, timings = measure(size, contestants, parts, device, text, "headline")
    what = {name: peer.what for name, peer in PEERS.items()}
    result = {"size": asdict(size), "parameters": size.parameters, "plain": plain, "skipped": skipped, "what": what}
    result["rows"] = rows(timings)
    result["read_seconds"] = 4 * size.parameters / copy_bandwidth(device)
    return result


def interval(device: Device, quick: bool, text: str | None) -> dict[str, Any]:
    """A whole interval, as proof that nothing but the measured step costs."""
    size = GPU["headline"] if device.name == "cuda" else HEADLINE
    every = 10
    own = SpectralMonitor(every_n_steps=every)
    ratios = measure_interval(size, own, every, 1 if quick else 5, device, text, f"one in {every}")
    return {"every": every, "ratio": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}


def series(device: Device, quick: bool, text: str | None) -> dict[str, list[dict[str, Any]]]:
    """Size, depth, width and batch, each with ratios and counts; what does not fit into memory is left out."""
    chosen = QUICK if quick else SERIES
    if device.name == "cuda":
        chosen = {"size": GPU["size"]}
    series_points: dict[str, list[dict[str, Any]]] = {}
    for name, sizes in chosen.items():
        series_points[name] = []
        for size in sizes:
            point: dict[str, Any] = {"size": asdict(size), "parameters": size.parameters, "label": size.describe()}
            series_points[name].append(point)
            needed, memory = size.bytes_needed, available(device)
            if memory and needed > 0.9 * memory:
                point["skipped"] = f"needs {needed / 2**30:.0f} GiB of memory, of which {memory / 2**30:.0f} are free"
                continue
            contestants: dict[str, Callback] = {kind: monitor(kind) for kind in (LIGHT, STANDARD)}
            parts = dict.fromkeys(contestants, (0, 2 if quick or size.parameters > 5e7 else 5))
            title = f"{name}: {size.describe()}"
            point["plain"], timings = measure(size, contestants, parts, device, text, title)
            point["rows"] = rows(timings)
            if size.parameters < 5e7 and device.name == "cpu":
                point["counts"] = {kind: plain_counts(counted(size, kind, text)) for kind in (LIGHT, STANDARD)}
    return series_points


def vision(device: Device, quick: bool, text: str | None) -> list[dict[str, Any]]:
    """Image classifiers, each with ratios and counts."""
    points = []
    for name in MODELS:
        case = Images(name)
        contestants: dict[str, Callback] = {kind: monitor(kind) for kind in (LIGHT, STANDARD)}
        parts = dict.fromkeys(contestants, (0, 2 if quick else 5))
        plain, timings = measure(case, contestants, parts, device, text, case.describe())
        counts = {kind: plain_counts(counted(case, kind, text)) for kind in (LIGHT, STANDARD)}
        about = {"label": case.describe(), "parameters": case.parameters, "plain": plain}
        points.append({**about, "rows": rows(timings), "counts": counts})
    return points


def compiled(device: Device, quick: bool, text: str | None) -> list[dict[str, Any]]:
    """The headline's model compiled, in half precision, and both: features come from a pass beside the step."""
    points = []
    for size, precision in ((Compiled(), "32-true"), (Size(), "bf16-mixed"), (Compiled(), "bf16-mixed")):
        label = f"{'compiled' if isinstance(size, Compiled) else 'not compiled'}, {precision}"
        contestants: dict[str, Callback] = {kind: monitor(kind) for kind in (LIGHT, STANDARD)}
        parts = dict.fromkeys(contestants, (0, 2 if quick else 5))
        plain, timings = measure(size, contestants, parts, Device(device.name, precision), text, label)
        points.append({"label": label, "plain": plain, "rows": rows(timings)})
    return points


def counted(size: Training, name: str, text: str | None) -> Counts:
    """Counts of a measured step."""
    module, data = size.start(text)
    batch = next(iter(data))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    settings = {key: value for key, value in SETTINGS[name].items() if key != "every_n_steps"}
    return count(module, optimizer, lambda model: model(*batch), **settings)


def plain_counts(counts: Counts) -> dict[str, Any]:
    """For a file: single numbers, and of passes and steps the mean and the most over layers."""
    names = ("operators", "read", "operators_fixed", "read_fixed", "allocations", "allocated", "peak", "crossings")
    numbers: dict[str, Any] = {name: getattr(counts, name) for name in (*names, "forwards")}
    for matrix in ("W", "dW", "drift"):
        passes = [n for (kind, _), n in counts.passes.items() if kind == matrix]
        steps = [counts.steps.get(key, 0) for key in counts.passes if key[0] == matrix]
        for name, values in (("passes", passes), ("steps", steps)):
            if values:
                numbers[f"{name} of {matrix}, mean"] = round(statistics.fmean(values), 2)
                numbers[f"{name} of {matrix}, most"] = max(values)
    return numbers


def all_counts(text: str | None) -> dict[str, dict[str, Any]]:
    """Count a measured step of the headline's model, one setting after the other."""
    progress = tqdm(COUNTED, "counts", leave=False, disable=None)
    return {name: plain_counts(counted(HEADLINE, name, text)) for name in progress}


def ranks(quick: bool, text: str | None) -> list[dict[str, Any]]:
    """Under DDP over gloo, processes with one thread each; the ratio is within each run."""
    cases = [
        scaling.Case(processes, "ddp", tier, 2, width=128 if quick else 256, batch=8, context=64, rounds=3, data=text)
        for tier in ("light", "standard")
        for processes in ((1, 2) if quick else (1, 2, 4))
    ]
    points = []
    for case, result in scaling.run(cases).items():
        ratios = result["ratios"]
        times = {"ratio": statistics.median(ratios), "low": min(ratios), "high": max(ratios), "plain": result["plain"]}
        points.append({"ranks": case.ranks, "tier": case.tier, "collectives": result["collectives"], **times})
    return points


def writing(quick: bool) -> list[dict[str, Any]]:
    """Measure the time and bytes of writing measurements, for every sink."""
    points = []
    every, rounds, matrices = 20, 1 if quick else 2, 100
    for bias in (False, True):
        measurements = logging_cost.measured(matrices, bias)
        for name in tqdm(
            logging_cost.SINKS, f"writing {'with' if bias else 'without'} biases", leave=False, disable=None
        ):
            cost = logging_cost.cost(name, measurements, every, rounds)
            numbers = len(measurements[-1].scalars() if name == "JSON lines" else essentials(measurements[-1]))
            points.append({"sink": name, "biases": bias, "numbers": numbers, "matrices": matrices, **asdict(cost)})
    return points
