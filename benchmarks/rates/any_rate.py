"""Is the learning rate right, whatever it was? Recipes that had no part in finding the shares, with and without.

    python -m benchmarks.rates.any_rate --write docs/any_rate.md      # half an hour on two cores
    python -m benchmarks.rates.any_rate --half development            # the recipes that shares were found on
    python -m benchmarks.rates.any_rate --steep --write docs/any_rate.md   # networks with shortened steps, both halves

Each recipe is trained with its learning rates times 1/4, 1/2, 1, 2 and 4, and further where the best is at an end, and
with ``SpectralLRCorrector()``'s correction at its own rates, at 100 times and at a hundredth of them. The figure is the
loss that the recipe is judged by, on fixed data, at the end; the mean of the seeds. Where one Adam trains everything,
Prodigy (``pip install prodigyopt``; left out where it is not installed) and schedule-free AdamW take its place.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import multiprocessing as mp
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, geometric_mean

import torch
from tqdm import tqdm

from benchmarks.rates import steep as steep_development
from benchmarks.rates import steep_heldout
from benchmarks.recipes.recipe import Half
from benchmarks.recipes.records import suite
from benchmarks.recipes.run import Run, finite
from spectral_monitor import LRCorrection, SpectralProbe

RECIPES: dict[Half, tuple[str, ...]] = {
    "held out": (
        "SELU MLP, SGD",
        "tanh MLP, NAdam",
        "tabular regression, Adam",
        "VGG, SGD",
        "GroupNorm conv net, Adam",
        "wide ResNet, SGD one cycle",
        "ConvNeXt, Muon",
        "DeiT, AdamW",
        "ViT, Lion",
        "GPT, AdamW",
        "nanoGPT tied, AdamW",
        "LLaMA tied, AdamW",
        "post-norm encoder, Adam",
        "LoRA, AdamW",
        "graph isomorphism net, Adam",
        "graph attention, Adam",
        "sparse autoencoder, Adam",
        "variational autoencoder, Adam",
    ),
}
"""One or two of each kind and optimizer, chosen by name before any of them was run with a correction."""
STEEP = (*steep_development.RECIPES, *steep_heldout.RECIPES)
NOT_SHORTENED = "corrected, steps not shortened"
GRID = (-2, -1, 0, 1, 2)
STARTS = (1.0, 100.0, 0.01)
Key = tuple[str, str, float, int]
"""Recipe, ``"plain"``, ``"corrected"``, that without looking at losses, or a rival; factor on the rates; seed."""
ADAM = (torch.optim.Adam, torch.optim.AdamW)
"""Whose place a rival can take."""


def train(run: Run, corrected: bool, size: float = LRCorrection.size, looks: bool = True) -> float:
    """Return the loss at the end; schedulers leave their mark in the groups, where there are any.

    ``looks``: whether the correction can look at the loss after a step.
    """
    base = [group["lr"] for group in run.groups()]
    if len({run.schedule(step) for step in range(run.steps)}) > 1:
        for group in run.groups():
            group["initial_lr"] = group["lr"]
    probe = None
    if corrected:
        rule = LRCorrection(size=size)
        settings = {"every_n_steps": 10, "quantities": rule.quantities, "roles": run.roles or None}
        probe = SpectralProbe(run.model, run.optimizers, mode="correct", correction=rule, **settings)
    for step in range(run.steps):
        for group, lr in zip(run.groups(), base, strict=True):
            group["lr"] = lr * run.schedule(step)
        if probe is None:
            run.step()
        else:
            repeatable_loss = run.next_loss()
            with probe.step():
                loss = run.step()
                if loss is not None and looks:
                    probe.report_loss(loss, repeatable_loss)
        run.after_step()
    return finite(run.evaluate())


def one(key: Key, half: Half) -> tuple[Key, float]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    name, how, factor, seed = key
    recipe = next(recipe for recipe in (*suite(half)[0], *STEEP) if recipe.name == name)
    run = recipe.build(seed, 1.0)
    run.scale_rates(factor)
    if how in RIVALS:
        if len(run.optimizers) > 1 or not isinstance(run.optimizers[0], ADAM):
            return key, math.nan
        RIVALS[how](run)
    return key, train(run, how in ("corrected", NOT_SHORTENED), looks=how != NOT_SHORTENED)


def prodigy(run: Run) -> None:
    """Put Prodigy in Adam's place, at its own learning rate of 1 and as its authors advise with a schedule."""
    from prodigyopt import Prodigy

    old = run.optimizers[0]
    most = max(group["lr"] for group in old.param_groups)
    groups = [
        {"params": group["params"], "lr": group["lr"] / most, "weight_decay": group["weight_decay"]}
        for group in old.param_groups
    ]
    run.optimizers = [Prodigy(groups, betas=old.defaults["betas"], safeguard_warmup=True, use_bias_correction=True)]


def schedule_free(run: Run) -> None:
    """Put schedule-free AdamW in Adam's place, at its default rate, with a warm-up and no decay."""
    from benchmarks.recipes.optimizers import AdamWScheduleFree

    old, evaluate = run.optimizers[0], run.evaluate
    groups = [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in old.param_groups]
    new = AdamWScheduleFree(groups, lr=2.5e-3, warmup_steps=run.steps // 20)

    def averaged() -> float:
        new.eval()
        return evaluate()

    run.optimizers, run.evaluate, run.schedule = [new], averaged, lambda step: 1.0


RIVALS = {"Prodigy": prodigy, "schedule-free": schedule_free}


class Losses:
    """Losses by key, in a file of JSON lines that a later run goes on from."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.by_key: dict[Key, float] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            *key, loss = json.loads(line)
            self.by_key[tuple(key)] = math.inf if loss is None else loss  # type: ignore[index]

    def add(self, key: Key, loss: float) -> None:
        self.by_key[key] = loss
        with self._path.open("a") as file:
            file.write(json.dumps([*key, None if loss == math.inf else loss]) + "\n")

    def mean(self, name: str, how: str, factor: float, seeds: int) -> float:
        """Return the mean over seeds; NaN where some are missing."""
        return fmean(self.by_key.get((name, how, factor, seed), math.nan) for seed in range(seeds))

    def best(self, name: str, seeds: int) -> tuple[int, float]:
        """Return the exponent of the best factor without correction, and its loss."""
        exponents = {round(math.log2(key[2])) for key in self.by_key if key[:2] == (name, "plain")}
        means = {e: self.mean(name, "plain", 2.0**e, seeds) for e in exponents}
        return min(((e, loss) for e, loss in means.items() if not math.isnan(loss)), key=lambda item: item[1])


def fill(losses: Losses, keys: Sequence[Key], half: Half, jobs: int, title: str) -> None:
    missing = [key for key in keys if key not in losses.by_key]
    with mp.get_context("spawn").Pool(jobs, maxtasksperchild=50) as pool:
        waiting = [pool.apply_async(one, (key, half)) for key in missing]
        for done in tqdm(waiting, title, disable=None, unit="run"):
            losses.add(*done.get())


def measure(losses: Losses, names: Sequence[str], half: Half, seeds: int, jobs: int) -> None:
    """Train what is missing, grids further where their best is at an end."""
    seed_range = range(seeds)
    keys = [(name, "corrected", start, seed) for name in names for start in STARTS for seed in seed_range]
    keys += [(name, "plain", 2.0**e, seed) for name in names for e in GRID for seed in seed_range]
    rivals = [how for how in RIVALS if how != "Prodigy" or importlib.util.find_spec("prodigyopt")]
    keys += [(name, how, 1.0, seed) for name in names for how in rivals for seed in seed_range]
    fill(losses, keys, half, jobs, f"{half} recipes")
    widen(losses, names, half, seeds, jobs)


def widen(losses: Losses, names: Sequence[str], half: Half, seeds: int, jobs: int) -> None:
    """Train at further rates where the best one is at an end of those tried."""
    for _ in range(3):
        further: list[Key] = []
        for name in names:
            at = losses.best(name, seeds)[0]
            further += [(name, "plain", 2.0 ** (at + d), seed) for d in (-1, 1) for seed in range(seeds)]
        fill(losses, further, half, jobs, "grids that end too early")


def table(losses: Losses, names: Sequence[str], seeds: int) -> list[str]:
    """Return a table of all recipes, and what they come to."""
    lines = [
        "| recipe | best rate | its loss | own rate / best | corrected | at x100 | at /100 | corrected / best "
        f"|{'|'.join(f' {how} / best ' for how in RIVALS)}|",
        "|---" * (8 + len(RIVALS)) + "|",
    ]
    ratios, spreads, own_ratios = {}, {}, {}
    rivals: dict[str, list[tuple[float, float]]] = {how: [] for how in RIVALS}
    for name in names:
        exponent, best = losses.best(name, seeds)
        plain = losses.mean(name, "plain", 1.0, seeds)
        corrected = [losses.mean(name, "corrected", start, seeds) for start in STARTS]
        ratios[name], own_ratios[name] = corrected[0] / best, plain / best
        spreads[name] = max(corrected) / min(corrected) - 1
        cells = [f"x {2.0**exponent:g}", f"{best:.4g}", f"{plain / best:.3f}"]
        cells += [f"{loss:.4g}" for loss in corrected]
        others = [losses.mean(name, how, 1.0, seeds) / best for how in RIVALS]
        for how, ratio in zip(RIVALS, others, strict=True):
            if not math.isnan(ratio):
                rivals[how].append((ratio, ratios[name]))
        rival_cells = ["" if math.isnan(ratio) else f"{ratio:.3f}" for ratio in others]
        lines.append(f"| {name} | {' | '.join(cells)} | **{ratios[name]:.3f}** | {' | '.join(rival_cells)} |")
    worst, widest = max(ratios, key=lambda name: ratios[name]), max(spreads, key=lambda name: spreads[name])
    good, close = (sum(ratio <= 1.03 for ratio in ratios.values()), sum(part <= 0.01 for part in spreads.values()))
    return [
        *lines,
        "",
        f"{len(names)} recipes, {seeds} seeds. Corrected over best: geometric mean "
        f"**{geometric_mean(ratios.values()):.3f}**, worst **{ratios[worst]:.3f}** ({worst}), {good} of {len(names)} "
        "at most 1.03; recipes at their own rate over best: geometric mean "
        f"{geometric_mean(own_ratios.values()):.3f}. The three starting rates end within "
        f"{max(spreads.values()):.1%} of each other ({widest}), {close} of {len(names)} within 1 %.",
        *(
            f"{how} on the {len(pairs)} recipes where it can stand in: {geometric_mean(a for a, _ in pairs):.3f} of "
            f"the best, worst {max(a for a, _ in pairs):.3f}; corrected on these: "
            f"{geometric_mean(b for _, b in pairs):.3f}."
            for how, pairs in rivals.items()
            if pairs
        ),
    ]


def steep(losses: Losses, seeds: int, jobs: int) -> list[str]:
    """Train the steep networks with and without looking at losses; return a table."""
    names = [recipe.name for recipe in STEEP]
    keys = [(name, how, 1.0, seed) for name in names for how in ("corrected", NOT_SHORTENED) for seed in range(seeds)]
    keys += [(name, "plain", 2.0**e, seed) for name in names for e in GRID for seed in range(seeds)]
    fill(losses, keys, "development", jobs, "steep networks")
    widen(losses, names, "development", seeds, jobs)
    lines = [
        "| network | half | best rate | its loss | own rate | corrected, steps not shortened | corrected |",
        "|---" * 7 + "|",
    ]
    for recipe in STEEP:
        exponent, best = losses.best(recipe.name, seeds)
        losses_of_ways = [losses.mean(recipe.name, how, 1.0, seeds) for how in ("plain", NOT_SHORTENED, "corrected")]
        cells = " | ".join(f"{loss:.3g}" for loss in (best, *losses_of_ways[:2]))
        lines.append(f"| {recipe.name} | {recipe.half} | x {2.0**exponent:g} | {cells} | **{losses_of_ways[2]:.3g}** |")
    return lines


def written(page: Path, name: str, lines: str) -> None:
    """Put lines into a page, between the comments of this name."""
    before, _, tail = page.read_text().partition(f"<!-- {name} -->\n")
    after = tail.partition(f"<!-- /{name} -->")[2]
    page.write_text(f"{before}<!-- {name} -->\n{lines}\n<!-- /{name} -->{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", default="held out", choices=("held out", "development"))
    parser.add_argument("--steep", action="store_true", help="the steep networks of benchmarks/rates/steep.py instead")
    parser.add_argument("--recipes", nargs="*", metavar="NAME", help="by default one of each kind")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes, of one thread each")
    parser.add_argument("--results", type=Path, default=Path("any_rate.jsonl"), help="file to go on from")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="page to put the table into")
    args = parser.parse_args()
    if args.steep:
        lines = "\n".join(steep(Losses(args.results), args.seeds, args.jobs))
        print(lines)
        if args.write is not None:
            written(args.write, "steep", lines)
        return
    names = args.recipes or RECIPES.get(args.half) or [recipe.name for recipe in suite(args.half)[0]]
    losses = Losses(args.results)
    measure(losses, names, args.half, args.seeds, args.jobs)
    lines = "\n".join(table(losses, names, args.seeds))
    print(lines)
    if args.write is not None:
        written(args.write, "table", lines)


if __name__ == "__main__":
    main()
