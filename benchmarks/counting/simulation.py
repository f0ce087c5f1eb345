"""What a measured step of a large model does on up to 4,096 processes, counted in a simulation of one of them.

    python -m benchmarks.counting.simulation                           # what is not in docs/simulated.json yet; an hour
    python -m benchmarks.counting.simulation --only "Llama 7B"         # of one model
    python -m benchmarks.counting.simulation --write docs/scaling.md   # the tables of what there is

The code is the real one, on fake tensors; see fakes.py for the three things that are put in the place of values. Blocks
of a network are alike, and so what is counted grows by the same with each: models are simulated with few blocks, at
full width and with all their processes, and the rest is a straight line. A test holds it against a third point:
messages lie on it, operators within half a percent.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tqdm.auto import tqdm

from benchmarks.counting.llama import CONFIGS
from benchmarks.counting.one_step import Way, simulated
from benchmarks.sections import write

RESULTS = Path(__file__).parents[2] / "docs" / "simulated.json"
LENGTH = 4096
"""Tokens of the one sequence on each process."""
STEPS = 7
"""Lanczos steps of every matrix: the look at which most of those of trained networks are decided."""
GB = 1e9


@dataclass(frozen=True)
class Case:
    model: str
    way: Way
    tier: str
    steps: int = STEPS

    @property
    def name(self) -> str:
        return f"{self.model}, {self.way.name}, {self.tier}, {self.steps} steps"


WAYS = {
    "Llama 7B": (Way(64), Way(64, tensor=8), Way(4096)),
    "Llama 70B": (Way(512), Way(512, tensor=8)),
    "mixture 400B": (Way(512),),
}
"""Not HSDP: its replicas share out layers, of a few blocks unevenly, so that the whole is on no straight line."""
CASES = [Case(model, way, tier) for tier in ("light", "standard") for model, ways in WAYS.items() for way in ways]


def uniform(steps: int) -> Callable[[], Callable[[str, int], Sequence[int]]]:
    """All matrices are decided after so many steps."""
    return lambda: lambda purpose, count: [steps] * count


def numbers(case: Case, depth: int) -> dict[str, float]:
    """Count a measured step of a model with this number of blocks."""
    config = replace(CONFIGS[case.model], depth=depth)
    done = simulated(config, case.way, (1, LENGTH), case.tier, uniform(case.steps))
    plain, measured = done.plain, done.measured
    sizes = [size for _, size in measured.collectives()]
    replay = [size for _, size in measured.collectives("replay")]
    forward = [size for _, size in plain.collectives("step")]
    return {
        "operators": measured.of(measured.operators, "monitor"),
        "operators of the replay": measured.of(measured.operators, "replay"),
        "operators of a plain step": plain.of(plain.operators, "step"),
        "read": measured.of(measured.read, "monitor"),
        "collectives": len(sizes),
        "bytes": sum(sizes),
        "replay bytes": sum(replay),
        "plain bytes": sum(forward),
        "own memory": measured.own,
        "peak beyond plain": measured.peak - plain.peak,
        "waits": sum(n for where, n in measured.waits.items() if not where.startswith("snapshot/")),
        "held": done.local_entries,
        "census": sizes[0],
        "census seconds": done.census,
    }


def line(case: Case, points: Sequence[int] | None = None) -> dict[str, float]:
    """The same of the whole model, by the straight line through two."""
    config = CONFIGS[case.model]
    small_depth, large_depth = points or ((2, 4) if config.experts else (1, 2))
    low, high = numbers(case, small_depth), numbers(case, large_depth)
    share = (config.depth - small_depth) / (large_depth - small_depth)
    return {key: low[key] + share * (high[key] - low[key]) for key in low}


HEAD = ["model", "processes", "tier", "operators", "of the plain step", "collectives", "sums, GB", "plain step, GB"]
HEAD += ["replay, GB", "waits", "reads, GB", "held, GB", "takes, GB", "census, MB"]


def report(results: dict[str, dict[str, float]]) -> str:
    """The table."""
    lines = ["| " + " | ".join(HEAD) + " |", "|---|---|---|" + "---:|" * (len(HEAD) - 3)]
    for case in CASES:
        if case.name not in results:
            continue
        result = results[case.name]
        cells = [case.model, f"{case.way.name} = {case.way.processes:,}", case.tier, f"{result['operators']:,.0f}"]
        cells += [f"{result['operators of a plain step']:,.0f}", f"{result['collectives']:.0f}"]
        cells += [f"{result[key] / GB:.2f}" for key in ("bytes", "plain bytes", "replay bytes")]
        cells += [f"{result['waits']:.0f}", f"{result['read'] / GB:.1f}", f"{4 * result['held'] / GB:.2f}"]
        cells += [f"{result['own memory'] / GB:.2f}", f"{result['census'] / 1e6:.1f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + f"\n\ntorch {torch.__version__.partition('+')[0]}; {len(lines) - 2} cases."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--again", action="store_true", help="also those that are there")
    parser.add_argument("--write", metavar="PAGE", help="write the table into a page, and simulate nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*data pointer of FakeTensor.*")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if args.write:
        write(Path(args.write), "simulated", report(results))
        return
    wanted = [case for case in CASES if args.only in case.name and (args.again or case.name not in results)]
    for case in tqdm(wanted, unit="case", file=sys.stderr):
        tqdm.write(case.name, file=sys.stderr)
        results[case.name] = line(case)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(report(results))


if __name__ == "__main__":
    main()
