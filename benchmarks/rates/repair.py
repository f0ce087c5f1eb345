"""Corrected runs with planted faults, and corrected healthy runs.

    python -m benchmarks.rates.repair            # all, as in docs/repair.md
    python -m benchmarks.rates.repair --quick    # narrow models, one seed

A run is trained to the end three times: healthy, with a fault, and with the fault under ``mode="correct"`` with the
policy "balance". If learning rates are at fault, or can compensate it, the last run should end where the first does.
Correction should change nothing in healthy runs.
"""

from __future__ import annotations

import argparse
import math
import warnings
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import torch

from benchmarks.rates.faults import FAULTS, begin
from benchmarks.rates.tuned import DATA, TASKS, Run, start
from spectral_monitor import LRCorrection, SpectralProbe

REPAIRABLE = frozenset({"lr_too_large", "lr_too_small", "sgd_rule_under_adam"})
"""Causes that learning rates of the layers that are named can do something about."""


def final_loss(run: Run, steps: int, every: int, correct: bool) -> tuple[float, dict[str, float]]:
    """Mean loss over the last tenth of the steps, and the multipliers that are not 1."""
    rule = LRCorrection("balance")
    settings = {"quantities": rule.quantities, "correction": rule, "mode": "correct"}
    probe = SpectralProbe(run.model, run.optimizer, every_n_steps=every, **settings) if correct else None
    losses = []
    for _ in range(steps):
        with nullcontext() if probe is None else probe.step():
            run.optimizer.zero_grad()
            loss = run.loss()
            loss.backward()
            run.optimizer.step()
        losses.append(float(loss.detach()))
        run.schedule.step()
        if not math.isfinite(losses[-1]):
            return math.inf, {}
    tail = losses[-steps // 10 :]
    multipliers = {} if probe is None else {layer: m for layer, m in probe.multipliers.items() if m != 1}
    return sum(tail) / len(tail), multipliers


@cache
def healthy_loss(task: str, width: int, data: Path) -> float:
    return final_loss(start(TASKS[task], data, width=width), TASKS[task].steps, 5, False)[0]


def repairs(data: Path, narrow: bool) -> None:
    print("| fault | healthy | with the fault | corrected | corrected vs. healthy | multipliers |")
    print("|---|---|---|---|---|---|")
    for fault in FAULTS.values():
        task = TASKS[fault.task]
        width = fault.width or task.width
        healthy = healthy_loss(fault.task, min(width, 512) if narrow else width, data)
        faulty, _ = final_loss(begin(fault, data, narrow=narrow), task.steps, 5, False)
        corrected, multipliers = final_loss(begin(fault, data, narrow=narrow), task.steps, 5, True)
        shown = ", ".join(f"{layer} {m:.2g}" for layer, m in multipliers.items())
        footnote = "" if fault.cause in REPAIRABLE else r" \*"
        off = f"{corrected / healthy - 1:+.0%}"
        cells = [f"{fault.name}{footnote}", f"{healthy:.4f}", f"{faulty:.4f}", f"{corrected:.4f}", off, shown]
        print("| " + " | ".join(cells) + " |", flush=True)
    print("\n\\* the fault is not in the learning rate of the named layer")


def harmless(data: Path, seeds: int) -> None:
    print("\n| healthy run | loss | with correction | multipliers |\n|---|---|---|---|")
    for task in TASKS.values():
        for seed in range(seeds):
            plain, _ = final_loss(start(task, data, seed=seed), task.steps, 10, False)
            corrected, multipliers = final_loss(start(task, data, seed=seed), task.steps, 10, True)
            print(
                f"| {task.name}, seed {seed} | {plain:.4f} | {corrected:.4f} | {multipliers or 'all 1'} |", flush=True
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="folder with cifar10_small.npz and tinyshakespeare.txt")
    parser.add_argument("--quick", action="store_true", help="models no wider than 512, one seed")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    repairs(args.data, args.quick)
    harmless(args.data, 1 if args.quick else 3)


if __name__ == "__main__":
    main()
