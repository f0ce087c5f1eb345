"""Does the best size of policy "target" stay where it is when a network gets wider, or deeper?

    python -m benchmarks.rates.size_transfer --write docs/transfer.md    # half an hour on two cores

Recipes of the development half at several widths and depths, each with the sizes 1/32, 1/16, 1/8, 1/4 and 1/2. The
figure is the loss that the recipe is judged by at the end, the mean of the seeds. Regret: what the smallest network's
best size costs at another width or depth.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing as mp
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.rates.any_rate import Losses, train
from benchmarks.recipes.development.language import gpt2, gpt_untied
from benchmarks.recipes.development.vision import vit
from benchmarks.recipes.records import suite

WIDTHS = {"MLP, Adam": (1, 8), "MLP, SGD": (1, 8), "VAE, Adam": (1, 8), "GPT untied, AdamW": (1, 4)}
"""Recipe -> widths, in multiples of its own."""
DEPTHS = {"GPT-2, AdamW": (gpt2, (3, 12)), "GPT untied, AdamW": (gpt_untied, (3, 12)), "ViT, AdamW": (vit, (3, 12))}
"""Recipe -> builds it at a depth, and depths, in blocks."""
BLOCKS = " blocks"
SIZES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)
Key = tuple[str, str, float, int]
"""Recipe, scale, size, seed."""


def one(key: Key) -> tuple[Key, float]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    name, scale, size, seed = key
    if scale.endswith(BLOCKS):
        run = DEPTHS[name][0](seed, depth=int(scale.removesuffix(BLOCKS)))
    else:
        recipe = next(recipe for recipe in suite("development")[0] if recipe.name == name)
        run = recipe.build(seed, float(scale))
    return key, train(run, corrected=True, size=size)


def scales() -> Iterator[tuple[str, Sequence[str]]]:
    """Yield each recipe with what it is tried at, the smallest first."""
    yield from ((name, [str(width) for width in widths]) for name, widths in WIDTHS.items())
    yield from ((name, [f"{depth}{BLOCKS}" for depth in depths]) for name, (_, depths) in DEPTHS.items())


def table(losses: Losses, seeds: int) -> Sequence[str]:
    lines = [
        f"| recipe | width or depth | {' | '.join(f'size {size:g}' for size in SIZES)} | best | regret |",
        "|---" * 9 + "|",
    ]
    for name, tried in scales():
        first = math.nan
        for scale in tried:
            means = {size: losses.mean(name, scale, size, seeds) for size in SIZES}
            best = min(means, key=lambda size: means[size])
            first = best if scale == tried[0] else first
            cells = [f"**{loss:.4g}**" if size == best else f"{loss:.4g}" for size, loss in means.items()]
            regret = means[first] / means[best] - 1
            label = scale if scale.endswith(BLOCKS) else f"x {scale}"
            lines.append(f"| {name} | {label} | {' | '.join(cells)} | {best:g} | {regret:.1%} |")
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
        (name, scale, size, seed)
        for name, tried in scales()
        for scale in reversed(tried)
        for size in SIZES
        for seed in range(args.seeds)
    ]
    with mp.get_context("spawn").Pool(args.jobs, maxtasksperchild=20) as pool:
        missing = [key for key in keys if key not in losses.by_key]
        for key, loss in tqdm(pool.imap_unordered(one, missing), total=len(missing), disable=None, unit="run"):
            losses.add(key, loss)
    lines = "\n".join(table(losses, args.seeds))
    print(lines)
    if args.write is not None:
        before, _, tail = args.write.read_text().partition("<!-- sizes -->\n")
        after = tail.partition("<!-- /sizes -->")[2]
        args.write.write_text(f"{before}<!-- sizes -->\n{lines}\n<!-- /sizes -->{after}")


if __name__ == "__main__":
    main()
