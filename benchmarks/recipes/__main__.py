"""Verdict quality: recipes as people train, faults as people make them, and what the judge says of both.

    python -m benchmarks.recipes --half development            # rules may be found on this half
    python -m benchmarks.recipes --width --write docs/verdict_quality.md  # the other half, reported

Runs are kept in a folder (``--records``), so that judging them again takes no training. A half takes about 15 minutes
on one core.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from benchmarks.recipes.outcome import faulty_runs, healthy_runs
from benchmarks.recipes.page import page
from benchmarks.recipes.recipe import Half
from benchmarks.recipes.width import TASKS, both_ways, markdown

SEEDS = (2, 3)
"""Of the table on width: they played no part in its rule."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", choices=("development", "held out"), default="held out")
    parser.add_argument(
        "--records", type=Path, default=Path(tempfile.gettempdir()) / "spectral_monitor_recipes", help="folder of runs"
    )
    parser.add_argument("--width", action="store_true", help="also the table on width, four minutes more")
    parser.add_argument("--write", type=Path, help="Markdown page to write")
    args = parser.parse_args()
    torch.set_num_threads(1)
    half: Half = args.half
    folder = args.records / half.replace(" ", "_")
    base = healthy_runs(half, folder)
    runs = faulty_runs(half, folder, base)
    text = page(half, base, runs, markdown(both_ways(TASKS, *SEEDS)) if args.width else "")
    if args.write:
        args.write.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
