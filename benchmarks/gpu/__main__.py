"""What the monitor does on an accelerator, in at most eight minutes: ``make gpu`` writes docs/gpu.md.

Numbers are compared with the CPU's, training with and without the monitor bit by bit, waits are counted by CUDA, and
cost and memory are those of GPT-2 with 124 and 350 million parameters in bf16. Without an accelerator it says so and
stops.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

import torch

from benchmarks.cost.machine import describe
from benchmarks.cost.models import GPU, Size
from benchmarks.cost.rounds import Device
from benchmarks.gpu.cost import STEPS, Cost, Loop, cost, share
from benchmarks.gpu.trainers import Outcome, rows, tried

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
SMALL = Size(128, 2, 4, 4, 64, vocab=96)
"""Compared in float32 with the CPU, where a larger one takes long."""
TIERS = ("light", "standard", "full")
NO_DEVICE = "no accelerator that CUDA knows was found: nothing was measured, and docs/gpu.md stays as it is"
ABOUT = (
    "Does training stay the same on a GPU, are the numbers those of a CPU, and what does a measured step cost?\n"
    "`make gpu` measured this on one machine and wrote this page."
)
ABOUT_NUMBERS = (
    "A transformer of {model} in float32, without TF32. Each device trains by itself, so the numbers of the second "
    "step contain differences of training itself. All {pairs:,} pairs of numbers were compared; the table lists the "
    "quantities that differ most, relative to the larger number. `underflow_backward` is a share of a few entries, and "
    "on the other device different entries underflow."
)
ABOUT_COST = (
    "Plain and measured steps take turns; the ratio is the median of the pairs, with its quartiles. Memory is the most "
    "that all tensors take at a time. Much of a measured step is work of the host, which starts thousands of small "
    "calls, and a faster GPU does not shorten that. Under autocast, tier standard runs at most eight samples again in "
    "float32, forward and backward. With a batch of eight or less, as here, this may take more memory than training."
)
ABOUT_SHARE = (
    "How much longer {count} steps after the first hundred took, with default settings except the tier. Steps 1, 2, 4 "
    "and so on are measured, then every 100th as far as `max_overhead` (1 %) allows. The share does not rely on what "
    "the monitor reports: as many plain steps were timed before and after. It includes how the machine drifts "
    "meanwhile; where no step was measured, it is nothing but drift."
)
ABOUT_TRAINERS = (
    "Lightning's Trainer trains a small transformer with dropout for six steps, all of them measured, and once more "
    "without the monitor. Norms are compared with an SVD in float64; the monitor was asked for 1 %. Numbers are those "
    "of matrices. NaN are counted where float32 has a number, with their reasons. The corrector is meant to change "
    "training, so two corrected runs are compared."
)
WIDTH = 120
"""Characters in a line of the page."""
BUDGET = 300
"""Seconds after which no further model is begun."""
COSTED = ("light", "standard")
"""Tiers whose cost is measured: the third one takes minutes a step."""


# --- numbers


@dataclass(frozen=True)
class Difference:
    """How far the numbers of a quantity are apart on two devices, relative to the larger."""

    key: str
    worst: float
    layer: str
    compared: int


def differences(device: str, size: Size = SMALL, steps: int = 2) -> list[Difference]:
    """Return for every quantity how far the device's numbers are from the CPU's, over layers and steps."""
    measurements = []
    for side in ("cpu", device):
        loop = Loop(size, side)
        probe = loop.probe("full", tol=1e-4)
        for _ in range(steps):
            loop.step(probe)
        measurements.append(probe.measurements)
    worst = []
    for key in measurements[0][0].values:
        pairs = [
            (relative(a.value(key, info.name), b.value(key, info.name)), info.name)
            for a, b in zip(*measurements, strict=True)
            for info in a.layers
        ]
        both = [(difference, name) for difference, name in pairs if not math.isnan(difference)]
        if both:
            worst.append(Difference(key, *max(both), len(both)))
    return sorted(worst, key=lambda result: -result.worst)


def relative(a: float, b: float) -> float:
    """Return the difference of two numbers relative to the larger; infinite where only one is NaN, NaN where both are.

    Example:
        >>> relative(2.0, 1.0), relative(0.0, 0.0), relative(math.nan, 1.0)
        (0.5, 0.0, inf)
    """
    if math.isnan(a) or math.isnan(b):
        return math.nan if math.isnan(a) and math.isnan(b) else math.inf
    return abs(a - b) / max(abs(a), abs(b)) if a != b else 0.0


def same_bits(device: str, quantities: str, size: Size = SMALL, half: bool = False, steps: int = 4) -> bool:
    """Return whether training with a monitor ends with the bits of training without one."""
    ends = []
    for measured in (False, True):
        loop = Loop(size, device, half)
        probe = loop.probe(quantities) if measured else None
        for _ in range(steps):
            loop.step(probe)
        ends.append([tensor.detach().cpu() for tensor in loop.everything()])
    plain, watched = ends
    return len(plain) == len(watched) and all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


# --- waits


def waits(quantities: str, size: Size = SMALL) -> tuple[int, int]:
    """Return how often the host waits for the device in the forward and the backward pass of a measured step, and in
    all of it.

    An unmeasured loop waits for nothing, so each is the monitor's.
    """
    loop = Loop(size, "cuda")
    probe = loop.probe(quantities)
    for _ in range(2):  # the first one finds out what there is
        loop.step(probe)
    with cuda_warnings() as caught, probe.step():
        loop.forward_backward()
        before = synchronizations(caught)
        loop.optimizer.step()
    return before, synchronizations(caught)


@contextmanager
def cuda_warnings() -> Iterator[list[warnings.WarningMessage]]:
    """Inside, CUDA warns of every wait of the host for the device, and all warnings are in the list."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield caught
        finally:
            torch.cuda.set_sync_debug_mode(mode)


def synchronizations(caught: Sequence[warnings.WarningMessage]) -> int:
    """Return how many of the warnings are of a wait: "called a synchronizing CUDA operation"."""
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)


# --- the page


def page(
    machine: dict[str, Any],
    numbers: Sequence[Difference],
    bits: dict[str, bool],
    waiting: dict[str, tuple[int, int]],
    costs: dict[str, Sequence[Cost]],
    shares: Sequence[tuple[str, str, float, int]],
    trainers: dict[str, Outcome],
) -> str:
    """Return docs/gpu.md: what was found, beside the goals."""
    worst = [[f"`{d.key}`", f"{d.worst:.1e}", f"`{d.layer}`", d.compared] for d in numbers[:12]]
    steps = [
        [
            title,
            c.quantities,
            f"{1000 * c.plain:.1f}",
            f"{c.ratio:.2f} ({c.low:.2f} to {c.high:.2f})",
            {"light": "1.10", "standard": "1.25"}.get(c.quantities, "-"),
            f"{c.plain_bytes / 2**30:.2f}",
            f"{c.measured_bytes / 2**30:.2f}",
        ]
        for title, model_costs in costs.items()
        for c in model_costs
    ]
    return (
        "\n\n".join(
            (
                "# On a GPU",
                ABOUT,
                table(("machine", ""), [[key, value] for key, value in machine.items()]),
                "## Numbers against the CPU's",
                fill(ABOUT_NUMBERS.format(model=SMALL.describe(), pairs=sum(d.compared for d in numbers)), WIDTH),
                table(("quantity", "largest difference", "layer", "compared"), worst),
                "## Training with and without it",
                "Parameters, gradients and optimizer states after four steps:",
                table(("what", "bits"), [[what, "the same" if same else "**differ**"] for what, same in bits.items()]),
                "## Waits of the host for the device in one measured step",
                "CUDA counts these waits (`torch.cuda.set_sync_debug_mode`). The goals are 0 and 10.",
                table(("tier", "forward and backward", "in all"), [[tier, *both] for tier, both in waiting.items()]),
                "## Cost and memory of a measured step",
                fill(ABOUT_COST, WIDTH),
                table(("model", "tier", "plain, ms", "measured / plain", "goal", "plain, GiB", "measured, GiB"), steps),
                "## Share of training time",
                fill(ABOUT_SHARE.format(count=STEPS), WIDTH),
                table(
                    ("model", "tier", "share", "steps measured"),
                    [[title, tier, f"{100 * part:.1f} %", count] for title, tier, part, count in shares],
                ),
                "## Ways to train",
                fill(ABOUT_TRAINERS, WIDTH),
                table(("way", "bits", "norms against an SVD", "numbers"), rows(trainers)),
            )
        )
        + "\n"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table in Markdown."""
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (head, ["---"] * len(head), *rows))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the page; 1 if training was not the same or a forward waited."""
    argparse.ArgumentParser(description=__doc__).parse_args(arguments)
    if not torch.cuda.is_available():
        print(NO_DEVICE)
        return 0
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    begin = time.perf_counter()
    bits = {f"float32, {tier}": same_bits("cuda", tier) for tier in TIERS}
    bits |= {f"bf16 by autocast, {tier}": same_bits("cuda", tier, half=True) for tier in TIERS}
    waiting = {tier: waits(tier) for tier in TIERS}
    numbers = differences("cuda")
    trainers = tried("gpu")
    costs: dict[str, list[Cost]] = {}
    shares: list[tuple[str, str, float, int]] = []
    for size in GPU["size"]:
        if time.perf_counter() - begin > BUDGET or size.bytes_needed > torch.cuda.mem_get_info()[0]:
            continue
        loop = Loop(size, "cuda", half=True)
        title = f"{size.parameters / 1e6:.0f} M, {size.describe()}"
        costs[title] = [cost(loop, tier, torch.cuda.synchronize) for tier in COSTED]
        shares += [(title, tier, *share(loop, tier, torch.cuda.synchronize)) for tier in COSTED]
        del loop
    machine = describe(Device("cuda", "bf16-mixed"))
    PAGE.write_text(page(machine, numbers, bits, waiting, costs, shares, trainers), encoding="utf-8")
    print(f"wrote {PAGE} in {time.perf_counter() - begin:.0f} s")
    wrong = [title for title, outcome in trainers.items() if outcome.error or (outcome.repeats and not outcome.same)]
    print(*(f"{title}: {trainers[title].error or 'differs'}" for title in wrong), sep="\n")
    return int(bool(wrong) or not all(bits.values()) or any(waiting[tier][0] for tier in COSTED))


if __name__ == "__main__":
    sys.exit(main())
