"""Does the best learning rate stay where it is when the network gets wider? A table and a plot.

    python -m benchmarks.rates.transfer                        # all tasks; hours on two cores
    python -m benchmarks.rates.transfer --tasks "MLP, Adam"    # one of them
    python -m benchmarks.rates.transfer --quick                # narrow networks, one seed: minutes
    python -m benchmarks.rates.transfer --report               # what the results file holds, into docs/

For every task, method and width the learning rates 2^k are searched, from where the narrower network had its best one,
until the best is no end of those tried. Results are written to a file as they come, and a later run goes on from it.

Methods: *default*: PyTorch's initialization, one learning rate. *target*: the same model and code, with
``LRCorrection("target", size="lr", spectral_init=True)``. *mup*: microsoft/mup 1.0, base shapes of the narrowest width;
it needs another readout class (``pip install --no-deps mup``), and is left out where it is not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import multiprocessing as mp
import os
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.rates.transfer_tasks import TASKS, train

Key = tuple[str, str, int, int, int]
"""Task, method, width, exponent of the learning rate, seed."""
DOCS = Path(__file__).parents[2] / "docs"


def run(key: Key, data: str) -> tuple[Key, float, float]:
    torch.set_num_threads(1)
    begin = time.perf_counter()
    task, method, width, exponent, seed = key
    return key, train(task, method, width, 2.0**exponent, seed, data), time.perf_counter() - begin


class Results:
    """Losses by key, in a file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.losses: dict[Key, float] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            *key, loss = json.loads(line)
            self.losses[tuple(key)] = loss  # type: ignore[index]

    def add(self, key: Key, loss: float) -> None:
        self.losses[key] = loss
        with self.path.open("a") as file:
            file.write(json.dumps([*key, loss]) + "\n")

    def mean(self, task: str, method: str, width: int, exponent: int, seeds: int) -> float:
        """Over seeds; nan if some are missing."""
        losses = [self.losses.get((task, method, width, exponent, seed), math.nan) for seed in range(seeds)]
        return statistics.mean(losses)

    def best(self, task: str, method: str, width: int) -> tuple[int, float] | None:
        """Exponent and mean loss of the best learning rate."""
        by_exponent = defaultdict(list)
        for (*run, exponent, _), loss in self.losses.items():
            if run == [task, method, width]:
                by_exponent[exponent].append(loss)
        most = max(map(len, by_exponent.values()), default=0)
        means = {e: statistics.mean(losses) for e, losses in by_exponent.items() if len(losses) == most}
        return min(means.items(), key=lambda item: item[1]) if means else None


def search(task: str, method: str, width: int, start: int, results: Results, args: argparse.Namespace) -> int:
    """The exponent of the best learning rate: neighbours are tried until none is better."""
    with mp.get_context("spawn").Pool(args.jobs) as pool:
        best = start
        while True:
            keys = [(task, method, width, e, seed) for e in (best - 1, best, best + 1) for seed in range(args.seeds)]
            missing = [key for key in keys if key not in results.losses]
            waiting = [pool.apply_async(run, (key, args.data)) for key in missing]
            for done in tqdm(waiting, f"{task}, {method}, width {width}, 2^{best}", disable=None, leave=False):
                key, loss, seconds = done.get()
                results.add(key, loss)
                print(f"{key}: {loss:.4f} ({seconds:.0f} s)", file=sys.stderr, flush=True)
            means = {e: results.mean(task, method, width, e, args.seeds) for e in (best, best - 1, best + 1)}
            lowest = min(means, key=lambda e: means[e])
            if lowest == best or not math.isfinite(means[lowest]):
                return best if math.isfinite(means[best]) else best - 3
            best = lowest


def methods(task: str) -> list[str]:
    installed = importlib.util.find_spec("mup") is not None
    return [method for method in TASKS[task].start if method != "mup" or installed]


def table(results: Results) -> list[str]:
    lines = ["| task | method | " + "width: best learning rate, loss |" * 3 + " moved by |", "|---" * 6 + "|"]
    for task, spec in TASKS.items():
        for method in spec.start:
            best_by_width = {width: results.best(task, method, width) for width in spec.widths}
            if any(best_by_width.values()):
                cells = [f"{w}: 2^{b[0]}, {b[1]:.3f}" if b else f"{w}: -" for w, b in best_by_width.items()]
                exponents = [b[0] for b in best_by_width.values() if b]
                lines.append(f"| {task} | {method} | {' | '.join(cells)} | {2 ** (max(exponents) - min(exponents))} |")
    return lines


def plot(results: Results, path: Path) -> None:
    """Loss against learning rate: a row for each task, a column for each method, a line for each width."""
    import matplotlib.pyplot as plt

    columns = ["default", "target", "mup"]
    rows = [task for task in TASKS if any(key[0] == task for key in results.losses)]
    figure, axes = plt.subplots(len(rows), 3, figsize=(11, 2.6 * len(rows)), squeeze=False, layout="constrained")
    for row, task in zip(axes, rows, strict=True):
        optima = [results.best(task, method, width) for method in columns for width in TASKS[task].widths]
        best = [loss for _, loss in filter(None, optima)]
        for axis, method in zip(row, columns, strict=True):
            axis.set_title(f"{task}: {method}", fontsize=9)
            for shade, width in zip((0.35, 0.65, 0.95), TASKS[task].widths, strict=True):
                points = defaultdict(list)
                for (name, how, w, e, _), loss in results.losses.items():
                    if (name, how, w) == (task, method, width):
                        points[e].append(loss)
                if points:
                    xs = sorted(points)
                    axis.plot([2.0**x for x in xs], [statistics.mean(points[x]) for x in xs], "o-", ms=3,
                              color=plt.cm.viridis(1 - shade), label=f"width {width}")  # fmt: skip
            axis.set_xscale("log", base=2)
            axis.set_ylim(min(best) * 0.97, max(best) * 1.15)
            axis.set_xlabel("learning rate", fontsize=8)
            axis.tick_params(labelsize=7)
            if axis.lines:
                axis.legend(fontsize=7)
            else:
                axis.set_visible(False)
        row[0].set_ylabel("training loss at the end", fontsize=8)
    figure.savefig(path, dpi=110)


def report(results: Results) -> None:
    page = DOCS / "transfer.md"
    lines = "\n".join(table(results))
    if page.exists():
        before, _, tail = page.read_text().partition("<!-- table -->\n")
        _, _, after = tail.partition("<!-- /table -->")
        page.write_text(f"{before}<!-- table -->\n{lines}\n<!-- /table -->{after}")
    plot(results, DOCS / "transfer.png")
    print(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS), metavar="TASK")
    parser.add_argument("--methods", nargs="*", default=["default", "target", "mup"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes, of one thread each")
    data = Path(__file__).parents[3] / "shared" / "data"
    parser.add_argument("--data", default=str(data), help="folder with cifar10_small.npz and tinyshakespeare.txt")
    parser.add_argument("--results", type=Path, default=DOCS / "transfer.jsonl", help="file to go on from")
    parser.add_argument("--quick", action="store_true", help="the two narrower widths and one seed")
    parser.add_argument("--report", action="store_true", help="train nothing; write the table and the plot")
    args = parser.parse_args()
    results = Results(args.results)
    if args.report:
        report(results)
        return
    args.seeds = 1 if args.quick else args.seeds
    for task in args.tasks:
        for method in (m for m in methods(task) if m in args.methods):
            best = TASKS[task].start[method]
            for width in TASKS[task].widths[: 2 if args.quick else None]:
                best = search(task, method, width, best, results, args)
    print("\n".join(table(results)))
    print(f"\n{os.cpu_count()} CPU cores, torch {torch.__version__}")


if __name__ == "__main__":
    main()
