"""Does the best size of policy "target" stay where it is when a network gets wider?

    python -m benchmarks.rates.size_transfer --write docs/transfer.md    # a quarter of an hour on two cores

Recipes of the development half at several widths, each with the sizes 1/32, 1/16, 1/8, 1/4 and 1/2. The figure is the
loss that the recipe is judged by at the end, the mean of the seeds. Regret: what the narrowest network's best size
costs at another width.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing as mp
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.rates.any_rate import Losses, train
from benchmarks.recipes.records import suite

TASKS = {"MLP, Adam": (1, 8), "MLP, SGD": (1, 8), "VAE, Adam": (1, 8), "GPT untied, AdamW": (1, 4)}
"""Recipe -> widths, in multiples of its own."""
SIZES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)
Key = tuple[str, str, float, int]
"""Recipe, width, size, seed."""


def one(key: Key) -> tuple[Key, float]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    name, width, size, seed = key
    recipe = next(recipe for recipe in suite("development")[0] if recipe.name == name)
    return key, train(recipe.build(seed, float(width)), corrected=True, size=size)


def table(losses: Losses, seeds: int) -> Sequence[str]:
    lines = [f"| recipe | width | {' | '.join(f'size {size:g}' for size in SIZES)} | best | regret |", "|---" * 9 + "|"]
    for name, widths in TASKS.items():
        narrow = math.nan
        for width in widths:
            means = {size: losses.mean(name, str(width), size, seeds) for size in SIZES}
            best = min(means, key=lambda size: means[size])
            narrow = best if width == widths[0] else narrow
            cells = [f"**{loss:.4g}**" if size == best else f"{loss:.4g}" for size, loss in means.items()]
            regret = means[narrow] / means[best] - 1
            lines.append(f"| {name} | x {width} | {' | '.join(cells)} | {best:g} | {regret:.1%} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes, of one thread each")
    parser.add_argument("--results", type=Path, default=Path("size_transfer.jsonl"), help="file to go on from")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="page to put the table into")
    args = parser.parse_args()
    losses = Losses(args.results)
    keys: list[Key] = [
        (name, str(width), size, seed)
        for name, widths in TASKS.items()
        for width in reversed(widths)
        for size in SIZES
        for seed in range(args.seeds)
    ]
    with mp.get_context("spawn").Pool(args.jobs, maxtasksperchild=20) as pool:
        missing = [key for key in keys if key not in losses.found]
        for key, loss in tqdm(pool.imap_unordered(one, missing), total=len(missing), disable=None, unit="run"):
            losses.add(key, loss)
    lines = "\n".join(table(losses, args.seeds))
    print(lines)
    if args.write is not None:
        before, _, rest = args.write.read_text().partition("<!-- sizes -->\n")
        after = rest.partition("<!-- /sizes -->")[2]
        args.write.write_text(f"{before}<!-- sizes -->\n{lines}\n<!-- /sizes -->{after}")


if __name__ == "__main__":
    main()
