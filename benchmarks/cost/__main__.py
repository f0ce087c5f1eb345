"""What the monitor costs: measures it, writes docs/cost.json, docs/cost.md and the pictures; or checks it.

    python -m benchmarks.cost                  # everything, about 20 minutes on 2 cores; nothing else should run
    python -m benchmarks.cost --quick          # fewer rounds and smaller models, about 4 minutes
    python -m benchmarks.cost --only headline  # some parts; the others stay as they are in the file
    python -m benchmarks.cost --page           # the page and the pictures from the file
    python -m benchmarks.cost --check          # fails if a measured step has become dearer than the file says
    python -m benchmarks.cost --device cuda    # on a GPU: GPT-2 with 124 and 350 M parameters in bf16-mixed

Ratios are of steps of one run that take turns plain and measured, so they bear a machine that is busy with other
things, if not gladly. Counts are exact.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch  # noqa: F401  sets the level of its loggers
import torch

from benchmarks.cost.cases import LEFT_OUT, all_counts, compiled, headline, interval, ranks, series, vision, writing
from benchmarks.cost.check import compare_counts, compare_ratios, table
from benchmarks.cost.further import further
from benchmarks.cost.machine import describe
from benchmarks.cost.page import page
from benchmarks.cost.plots import draw
from benchmarks.cost.rounds import Device

DOCS = Path(__file__).parents[2] / "docs"
COUNTS = ("counts", "further")
"""Parts without times: what was said of the machine stays."""
CPU_ALONE = (*COUNTS, "writing", "ranks")
"""Parts that do not depend on the device, or run on processors."""


def parts(device: Device, quick: bool, text: str | None) -> dict[str, Callable[[], Any]]:
    """Everything that can be measured, by name; processes of its own come last."""
    all_parts: dict[str, Callable[[], Any]] = {
        "headline": lambda: headline(device, quick, text),
        "interval": lambda: interval(device, quick, text),
        "series": lambda: series(device, quick, text),
        "vision": lambda: vision(device, quick, text),
        "beside": lambda: compiled(device, quick, text),
        "counts": lambda: all_counts(text),
        "further": lambda: further(text),
        "writing": lambda: writing(quick),
        "ranks": lambda: ranks(quick, text),
    }
    return {name: part for name, part in all_parts.items() if device.name == "cpu" or name not in CPU_ALONE}


def read(path: Path) -> dict[str, Any]:
    """Return the numbers that were measured before."""
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return results


def write_page(folder: Path) -> None:
    """The page and the pictures from the file beside them."""
    results = read(folder / "cost.json")
    (folder / "cost.md").write_text(page(results))
    draw(results["cpu"], folder / "img" / "cost")
    print(f"wrote {folder / 'cost.md'}")


def run(args: argparse.Namespace, device: Device) -> None:
    """Measure and write."""
    args.out.mkdir(parents=True, exist_ok=True)
    results = read(args.out / "cost.json")
    device_results = results.setdefault(device.name, {})
    machine: dict[str, Any] = {}
    for name, part in parts(device, args.quick, args.data).items():
        if args.only and name not in args.only:
            continue
        if not machine and name not in COUNTS:
            machine = describe(device)
        begin = time.perf_counter()
        device_results[name] = part()
        print(f"{name}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
        if name not in COUNTS:
            device_results["machine"], device_results["mode"] = machine, "a quick run" if args.quick else "a full run"
        (args.out / "cost.json").write_text(json.dumps(results, indent=1) + "\n")
    if set(results.get("cpu", ())) >= set(parts(Device(), args.quick, args.data)):
        write_page(args.out)


def check(args: argparse.Namespace) -> bool:
    """Count and measure again, and print both; whether nothing has become dearer."""
    committed = read(args.out / "cost.json")["cpu"]
    then, now = committed["machine"], describe(Device())
    if [then[key] for key in ("cpu", "cores", "torch")] != [now[key] for key in ("cpu", "cores", "torch")]:
        print(f"committed on {then['cpu']}, {then['cores']} cores, torch {then['torch']}; ratios may differ here\n")
    lines = compare_counts(committed["counts"], all_counts(args.data))
    lines += compare_counts(committed["further"], further(args.data))
    result = headline(Device(), quick=True, text=args.data, peers=False)
    others = {
        *committed["headline"]["what"],
        *(name for name, reason in result["skipped"].items() if reason == LEFT_OUT),
    }
    ours = {name: row for name, row in committed["headline"]["rows"].items() if name not in others}
    lines += compare_ratios(ours, result["rows"])
    print(table(lines))
    bad = [line for line in lines if not line.good]
    print(
        f"\n{len(bad)} of {len(lines)} numbers have grown"
        if bad
        else f"\nall {len(lines)} numbers are as good or better"
    )
    return not bad


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--page", action="store_true", help="measure nothing, write the page from the file")
    mode.add_argument(
        "--check", action="store_true", help="compare with the file; the exit status says whether it holds"
    )
    names = list(parts(Device(), False, None))
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART", help=f"of {', '.join(names)}")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and smaller models")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where to train")
    parser.add_argument("--data", default=None, help="text file to train on; without one the licence text")
    parser.add_argument("--out", type=Path, default=DOCS, help="folder of cost.json, cost.md and img/cost")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    if args.check:
        sys.exit(0 if check(args) else 1)
    if args.page:
        write_page(args.out)
        return
    run(args, Device("cuda", "bf16-mixed") if args.device == "cuda" else Device())


if __name__ == "__main__":
    main()
