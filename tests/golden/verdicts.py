"""What the judge says of several hundred drawn runs, so that a changed rule shows which verdicts it moves.

python -m tests.golden.verdicts > tests/golden/verdicts.txt
python -m tests.golden.verdicts --run 17

The runs are made up of numbers: networks of drawn shapes under drawn optimizers and schedules, most of them with one to
three drawn faults. Nothing says that what is written here is right: that is what the tests of the judge are for.
"""

from __future__ import annotations

import argparse
import math
import random
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from spectral_monitor import LayerInfo, Measurement
from spectral_monitor.condition import Judge, SpectralCondition, Verdict, save_profile
from spectral_monitor.condition.optimizers.hyperparameters import Hyperparameters, family
from spectral_monitor.condition.optimizers.rates import RULES
from spectral_monitor.measurement import LOST, UNUSED

RUNS = 460
STEPS = (1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160)
OPTIMIZERS = ("AdamW", "AdamW", "Adam", "SGD", "SGD", "Lion", "Muon", "LAMB", "RMSprop", "Rprop", "Unheard")
FAULTS = (
    "rate",
    "rate",
    "rate",
    "every rate",
    "every rate",
    "update",
    "weights",
    "weights",
    "every weight",
    "dead",
    "lost",
    "cut off",
    "frozen",
    "stopped",
    "eps",
    "momentum",
    "outputs",
    "outputs",
    "targets",
    "loss",
    "edge",
    "again",
    "slips",
    "attention",
    "readout",
    "zero",
    "explodes",
    "grows",
    "no optimizer",
    "trained",
    "fast head",
    "frobenius",
    "corrected",
    "rounding",
    "rule",
    "warmup",
)
ZERO = "undefined: it divides by a norm that is zero"


@dataclass
class Run:
    """A run that may still be changed.

    Attributes:
        layers: of the network, by name.
        settings: of each layer.
        scale: quantity -> layer -> factor on what a healthy run has.
        values: (step, quantity, layer) -> value in the place of that.
        reasons: (step, quantity, layer) -> why there is none.
        summary: step -> values of the whole network.
        without: quantities that are not measured.
        condition: arguments of the condition.
        tied: layer -> layer whose parameters it shares.
        warmup: steps until the rates have reached their peaks.
        pace: relative update of a healthy layer.
        done: what was planted, in words.
    """

    layers: dict[str, LayerInfo]
    settings: dict[str, Hyperparameters]
    pace: float
    warmup: int
    condition: dict[str, Any]
    scale: dict[str, dict[str, float]] = field(default_factory=dict)
    values: dict[tuple[int, str, str], float] = field(default_factory=dict)
    reasons: dict[tuple[int, str, str], str] = field(default_factory=dict)
    summary: dict[int, dict[str, float]] = field(default_factory=dict)
    without: set[str] = field(default_factory=set)
    tied: dict[str, str] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)

    def times(self, factor: float, names: list[str], *quantities: str) -> None:
        """Multiply quantities of some layers at all steps."""
        for quantity in quantities:
            column = self.scale.setdefault(quantity, {})
            for name in names:
                column[name] = column.get(name, 1.0) * factor

    def put(self, value: float, name: str, *quantities: str, since: int = 0, reason: str = "") -> None:
        """Set quantities of a layer from a step on."""
        for step in STEPS:
            for quantity in quantities if step >= since else ():
                self.values[step, quantity, name] = value
                if reason:
                    self.reasons[step, quantity, name] = reason

    @property
    def matrices(self) -> list[str]:
        """Names of layers with a spectral norm."""
        return [name for name, info in self.layers.items() if info.role != "vector"]

    @property
    def dense(self) -> list[str]:
        """The same without embeddings."""
        return [name for name in self.matrices if self.layers[name].role != "embedding"]


def log_uniform(draw: random.Random, low: float, high: float) -> float:
    """Return a number whose logarithm is uniform."""
    return math.exp(draw.uniform(math.log(low), math.log(high)))


def layers(draw: random.Random) -> dict[str, LayerInfo]:
    """Return a network of drawn depth and widths."""
    found = {}
    widths = [draw.choice((16, 64, 64, 256, 1024)) for _ in range(draw.randint(2, 8))]
    if draw.random() < 0.4:
        found["tok"] = LayerInfo("tok", "embedding", widths[0], 1, (1000, widths[0]))
    taps = draw.random() < 0.2
    for k, (fan_in, fan_out) in enumerate(pairwise(widths)):
        name = f"blocks.{k}.{draw.choice(('in', 'out'))}"
        shape = (fan_out, fan_in, 3, 3) if taps else (fan_out, fan_in)
        found[name] = LayerInfo(name, "operator", fan_out, fan_in, shape)
        if draw.random() < 0.6:
            found[f"{name}.bias"] = LayerInfo(f"{name}.bias", "vector", 1, 1, (fan_out,))
    for name in ("head", "value")[: draw.choice((1, 1, 1, 2))]:
        found[name] = LayerInfo(name, "readout", 10, widths[-1], (10, widths[-1]))
    return found


def healthy(draw: random.Random) -> Run:
    """Return a run without a fault."""
    infos = layers(draw)
    names = [draw.choice(OPTIMIZERS)]
    names += [draw.choice((names[0], draw.choice(OPTIMIZERS)))] if draw.random() < 0.25 else []
    base = log_uniform(draw, 1e-4, 0.03)
    peaks = [base, base * draw.choice((1.0, 3.0, 0.1))]
    rule = draw.choice(("one rate",) * 5 + tuple(RULES))
    cut = draw.randint(1, len(infos))
    settings = {}
    for place, (name, info) in enumerate(infos.items()):
        owner = int(len(names) > 1 and place >= cut)
        lr = peaks[owner] * (1.0 if info.role != "operator" else 64 * RULES[rule](info) if rule != "one rate" else 1.0)
        kind = family([names[owner]])
        momentum = {"sgd": draw.choice((0.0, 0.9)), "adam": 0.9}.get(kind, 0.0)
        settings[name] = Hyperparameters(
            names[owner], kind, group=owner, owner=owner, lr=lr, peak=lr, momentum=momentum,
            eps=1e-8 if kind == "adam" else math.nan, weight_decay=draw.choice((0.0, 0.1)),
        )  # fmt: skip
    condition: dict[str, Any] = {}
    if draw.random() < 0.15:
        condition["reference"] = "theory"
    if draw.random() < 0.1:
        condition["band"] = (0.5, 2.0)
    if draw.random() < 0.1:
        condition["persistence"] = draw.choice((1, 2, 6))
    if draw.random() < 0.1:
        condition["expected"] = {draw.choice(("head", "blocks.*")): draw.choice((0.1, 4.0))}
    if draw.random() < 0.1:
        condition["ignore"] = [draw.choice(("updates", "features", "rates_too_small", "weights", "momentum"))]
    run = Run(infos, settings, log_uniform(draw, 0.004, 0.06), draw.choice((0, 0, 0, 10, 100)), condition)
    if draw.random() < 0.2:
        run.without = set(draw.sample(("update_fro", "weight_fro", "feature_rms", "contribution", "drift_ratio"), 2))
    if "tok" in infos and draw.random() < 0.3:
        run.tied = {"head": "tok"}
    return run


def plant(run: Run, draw: random.Random) -> None:
    """Plant one fault."""
    moves = ("update_natural", "update_ratio", "update_fro", "contribution", "drift_ratio")
    some = draw.sample(run.matrices, min(len(run.matrices), draw.choice((1, 1, 1, 2, 3))))
    factor = log_uniform(draw, 1.3, 300.0) ** draw.choice((-1, 1))
    kind = draw.choice(FAULTS)
    since = draw.choice((0, 0, 4, 32))
    if kind in ("rate", "every rate"):
        chosen = list(run.layers) if kind == "every rate" else some
        run.times(factor, chosen, *moves)
        for name in chosen:
            old = run.settings[name]
            run.settings[name] = replace(old, lr=old.lr * factor, peak=old.peak * factor)
    elif kind == "update":
        run.times(factor, some, *moves)
    elif kind in ("weights", "every weight"):
        run.times(factor, run.matrices if kind == "every weight" else some, "weight_natural", "weight_fro")
    elif kind in ("dead", "lost"):
        for name in some:
            run.put(0.0, name, *moves, since=since)
            run.put(0.0, name, "contribution", since=since, reason=LOST if kind == "lost" else "")
    elif kind == "cut off":
        for name in run.matrices[: len(some) + 1]:
            run.put(math.nan, name, "update_natural", "update_ratio", "update_fro", reason=UNUSED)
            run.put(0.0, name, "drift_ratio")
    elif kind == "frozen":
        for name in some:
            run.settings[name] = replace(run.settings[name], frozen=True)
            run.put(math.nan, name, *moves, reason="frozen")
    elif kind == "stopped":
        for name in run.layers if factor > 30 else some:
            run.settings[name] = replace(run.settings[name], lr=0.0, peak=0.0)
            run.put(0.0, name, *moves)
    elif kind == "eps":
        run.settings = {
            name: replace(setting, eps=draw.choice((1e-6, 1e-4, 0.1))) for name, setting in run.settings.items()
        }
        run.times(min(factor, 1 / factor), run.matrices, *moves)
    elif kind == "momentum":
        run.settings = {name: replace(setting, momentum=0.999) for name, setting in run.settings.items()}
    elif kind == "outputs":
        run.times(factor**2, some if factor > 5 else run.dense, "feature_rms")
    elif kind == "targets":
        run.summary.setdefault(1, {})["loss_distance"] = factor * 3
    elif kind == "loss":
        for step in STEPS:
            run.summary.setdefault(step, {})["loss"] = 2.3 if step < 32 else 2.3 * max(factor, 1 / factor)
        run.times(20.0, run.matrices, "update_ratio")
    elif kind == "edge":
        for step in STEPS:
            run.summary.setdefault(step, {})["edge"] = draw.uniform(0.5, 2.0) * min(max(factor, 0.3), 4.0)
    elif kind == "again":
        for step in STEPS[2:6]:
            run.summary.setdefault(step, {})["stale_gradient"] = 1.0
    elif kind == "slips":
        for step in STEPS:
            slip = run.summary.setdefault(step, {})
            slip["eval_share"], slip["dropout_largest"] = min(1.0, factor / 10), min(1.0, factor / 5)
            slip["unfit_loss_input"] = float(factor < 1)
    elif kind == "attention":
        name = draw.choice(run.matrices)
        for k, step in enumerate(STEPS):
            run.values[step, "attention_logit_max", name] = 2.0 * draw.choice((1.0, 1.7)) ** k
            run.values[step, "attention_entropy_lowest", name] = 0.6 / (1 + k * min(factor, 20))
            run.values.update({(step, "input_stable_rank", name): 1 + 5 * 3.0**-k for name in run.matrices})
    elif kind == "readout":
        for step in STEPS[draw.randint(0, 3) :]:
            run.summary.setdefault(step, {})["readout_share"] = draw.uniform(0.93, 0.99)
    elif kind == "zero":
        for name in some:
            run.put(0.0, name, "weight_natural", "weight_fro")
            for k, step in enumerate(STEPS[1:]):
                run.values[step, "weight_natural", name] = run.values[step, "weight_fro", name] = 0.02 * 1.6**k
            run.put(math.nan, name, "drift_ratio", reason=ZERO)
            run.values[1, "update_ratio", name], run.reasons[1, "update_ratio", name] = math.nan, ZERO
    elif kind == "explodes":
        for name in some if factor > 1 else run.matrices:
            run.put(draw.choice((3.0, 40.0)), name, "update_ratio", "drift_ratio", since=since)
            run.put(draw.choice((30.0, 3e4, math.inf)), name, "weight_natural", since=since + 1)
    elif kind == "grows":
        for k, step in enumerate(STEPS):
            for name in run.dense:
                run.values[step, "feature_rms", name] = 1.5**k
                run.values[step, "drift_ratio", name] = 1.4**k * min(factor, 1.0)
    elif kind == "no optimizer":
        for name in some:
            run.settings[name] = Hyperparameters()
            run.put(math.nan, name, *moves, "lr", reason="no optimizer updates it")
    elif kind == "trained":
        run.times(4.0, run.dense, "weight_natural")
    elif kind == "fast head":
        run.times(10.0, ["head"], *moves)
        old = run.settings["head"]
        run.settings["head"] = replace(old, lr=old.lr * 10, peak=old.peak * 10)
    elif kind == "frobenius":
        run.settings = {
            name: replace(setting, optimizer="LARS", family="lamb") for name, setting in run.settings.items()
        }
        run.times(factor, some, "update_natural")
    elif kind == "corrected":
        for name in run.matrices:
            run.put(draw.choice((0.2, 1.0, 3.0)), name, "lr_multiplier")
    elif kind == "rule":
        rule = draw.choice(list(RULES))
        for name in run.matrices:
            lr = 0.01 * RULES[rule](run.layers[name])
            run.settings[name] = replace(run.settings[name], lr=lr, peak=lr)
    elif kind == "warmup":
        reached = draw.uniform(0.1, 1.0)
        run.settings = {name: replace(setting, reached=reached) for name, setting in run.settings.items()}
    elif kind == "rounding":
        run.settings = {name: replace(setting, resolution=2**-7) for name, setting in run.settings.items()}
        run.times(min(factor, 1 / factor), run.matrices, *moves)
    run.done.append(kind)


def measurements(run: Run, draw: random.Random) -> Iterator[tuple[Measurement, dict[str, Hyperparameters]]]:
    """Yield every measurement of a run, and the settings at that step."""
    usual = {name: draw.gauss(0.0, 0.25) for name in run.layers}
    loss = 2.3
    for step in STEPS:
        now = min(1.0, step / run.warmup) if run.warmup else 1.0
        table: dict[str, dict[str, float]] = {}
        for name, info in run.layers.items():
            taps = math.prod(info.shape[2:]) if len(info.shape) > 2 else 1
            spread = math.exp(usual[name] + draw.gauss(0.0, 0.1))
            moved = run.pace * now * spread
            norm = math.sqrt(info.fan_out * taps) * math.exp(0.1 * usual[name])
            healthy_values = {
                "weight_natural": 1.6 * taps**0.5,
                "weight_fro": norm if info.role != "vector" else 1.0,
                "update_natural": moved * 1.2 * taps**0.5,
                "update_ratio": moved,
                "update_fro": moved * norm * 0.7,
                "drift_ratio": run.pace * math.sqrt(step) * 0.6,
                "contribution": 0.01 * spread,
                "lr": run.settings[name].lr * now,
                "feature_rms": 1.0 * spread,
            }
            for quantity, value in healthy_values.items():
                if quantity not in run.without:
                    factor = run.scale.get(quantity, {}).get(name, 1.0)
                    table.setdefault(quantity, {})[name] = value * factor
        reasons = {}
        for (at, quantity, name), value in run.values.items():
            if at == step and quantity not in run.without:
                table.setdefault(quantity, dict.fromkeys(run.layers, math.nan))[name] = value
        for (at, quantity, name), reason in run.reasons.items():
            if at == step and quantity in table:
                reasons[f"{quantity}/{name}"] = reason
        loss *= math.exp(-0.1 + draw.gauss(0.0, 0.05))
        summary = {"loss": loss, "loss_distance": 1.0 if step == 1 else math.nan} | run.summary.get(step, {})
        values = {key: torch.tensor([column[name] for name in run.layers]) for key, column in table.items()}
        settings = {name: replace(setting, lr=setting.lr * now) for name, setting in run.settings.items()}
        yield Measurement(step, tuple(run.layers.values()), values, summary, reasons=reasons), settings


def widened(run: Run, factor: int) -> Run:
    """Return a run of the same network, wider."""
    wide = {
        name: replace(
            info,
            fan_in=info.fan_in * factor if name != run.matrices[0] and info.role != "embedding" else info.fan_in,
            fan_out=info.fan_out * factor if info.role == "operator" else info.fan_out,
        )
        for name, info in run.layers.items()
    }
    run = replace(run, layers=wide)
    run.times(factor**0.8, run.dense, "update_natural", "update_ratio", "update_fro")
    return run


def account(seed: int, folder: Path) -> tuple[str, list[str]]:
    """Return one line on a run, and everything that is said of it.

    The line has the optimizers, the faults, every root with the step that it is first seen at, and a checksum of all.
    """
    draw = random.Random(seed)
    run = healthy(draw)
    if seed % 8 == 0:  # beside a profile, in another width or the same
        profile = folder / "profile.json"
        before = list(measurements(run, draw))
        save_profile([m for m, _ in before], profile, before[0][1])
        run = widened(replace(run, condition={"reference": profile}), draw.choice((1, 4, 16)))
    for _ in range(draw.choice((0, 1, 1, 2, 3))):
        plant(run, draw)
    everything, roots = [], {}
    judge = None
    for measurement, settings in measurements(run, draw):
        try:
            judge = judge or Judge(SpectralCondition(**run.condition), run.tied)
            verdicts = judge.judge(measurement, settings)
        except ValueError as error:
            roots[f"refused: {error}".replace(str(folder), "")] = measurement.step
            break
        states = sorted(judge.states.items())
        everything += [f"step {measurement.step}", *map(told, verdicts)]
        everything += [f"{name}: {state.state} {state.reason}" for name, state in states]
        for verdict in verdicts:
            if verdict.is_root:
                roots.setdefault(f"{verdict.layer} {verdict.cause}", measurement.step)
    optimizers = sorted({setting.optimizer for setting in run.settings.values()})
    seen = ", ".join(f"{step} {root}" for root, step in roots.items()) or "nothing"
    checksum = zlib.crc32("\n".join(everything).encode())
    return f"{seed}: {', '.join(optimizers)}: {', '.join(run.done) or 'healthy'}: {seen}: {checksum:08x}", everything


def told(verdict: Verdict) -> str:
    """Return a verdict in a line, but for what changes at every measurement."""
    remedy = verdict.remedy
    advice = f"{remedy.action} {','.join(remedy.layers)} {remedy.value:.3g}" if remedy else ""
    ties = f"root {verdict.root}" if verdict.root else f"so {','.join(verdict.consequences)}"
    return (
        f"{verdict.layer} [{verdict.cause}] {verdict.quantity} in {verdict.band[0]:.3g}..{verdict.band[1]:.3g}; "
        f"of {','.join(verdict.layers)}; {ties}; {advice}; {verdict.sentence}"
    )


def lines() -> list[str]:
    """Return a line on every run."""
    with tempfile.TemporaryDirectory() as folder:
        return [account(seed, Path(folder))[0] for seed in range(RUNS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=int, help="write everything that is said of one run")
    run = parser.parse_args().run
    if run is None:
        print("\n".join(lines()))
    else:
        with tempfile.TemporaryDirectory() as folder:
            print("\n".join(account(run, Path(folder))[1]))


if __name__ == "__main__":
    main()
