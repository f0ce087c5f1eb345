"""What a measured step of a large model would send, by formulas whose block steps are counted, not guessed.

    python -m benchmarks.counting.extrapolation                  # 7 billion parameters on 64 GPUs
    python -m benchmarks.counting.extrapolation --link 25        # over slower cards

The formulas are compared with what scaling.py counts on a transformer of width 512 first.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time

import torch

from benchmarks.counting.scaling import PURPOSES, Case, Shape, run
from spectral_monitor.capture.row_sampling import sample_size
from spectral_monitor.engine.weights.norms import rows_worth
from spectral_monitor.layers import Layout
from spectral_monitor.linalg import spectral_estimate
from spectral_monitor.linalg.lanczos import BLOCK
from spectral_monitor.linalg.spectral_norms import MAX_STEPS


def llama() -> list[Shape]:
    """Llama 7B: fan_out, fan_in and role of every matrix."""
    d, hidden, vocabulary = 4096, 11008, 32000
    block = [(d, d, "operator")] * 4 + [(hidden, d, "operator")] * 2 + [(d, hidden, "operator")]
    return [(vocabulary, d, "embedding"), *block * 32, (vocabulary, d, "readout")]


KINDS = 3
"""Matrices that are measured of each weight: itself, its update and its drift."""


def lanczos_numbers(rows: int, cols: int) -> int:
    """Numbers summed in a block step for a matrix whose rows lie in several processes.

    The Krylov space is grown on the short side. If that is the columns (or the matrix is
    square), ``A^T (A x)`` is summed; if it is the rows, ``A^T x`` is summed first.
    """
    return BLOCK * (cols if rows >= cols else rows + cols)


def traffic(
    shapes: list[Shape],
    steps: dict[str, float],
    sharded: bool,
    rows_seen: int,
    tier: str = "standard",
    layers: list[Shape] | None = None,
) -> dict[str, float]:
    """Bytes one process hands to sums in a measured step, by purpose, to first order.

    Args:
        shapes: fan_out, fan_in and role of the matrices.
        steps: block steps, by purpose, mean over matrices.
        sharded: whether rows of matrices lie in several processes (FSDP2, HSDP), or each has all (DDP).
        rows_seen: rows of a layer's features in the whole batch.
        tier: ``"light"`` or ``"standard"``.
        layers: the same of whole weights, where some hold several matrices.
    """

    sent = dict.fromkeys(PURPOSES, 0.0)
    for m, n, _ in shapes:
        sent["matrices"] += KINDS * (4 * steps.get("matrices", 0.0) * lanczos_numbers(m, n) if sharded else 4 * 5)
    if tier == "standard":
        for m, n, role in layers or shapes:
            features = [n] if role == "embedding" else [n, m]
            for size in features:
                rows = min(rows_seen, sample_size(size))
                sent["rows"] += 4 * steps.get("rows", 0.0) * lanczos_numbers(rows, size)
            if role != "embedding":
                sent["inputs"] += 4 * min(rows_seen, rows_worth(Layout("linear", (m, n)))) * n
    return sent


def counted_steps(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Block steps by purpose: counted on a wider transformer that was trained for a while, and on Gaussian matrices of
    the size in question.
    """
    every = 10 if args.quick else 30
    wide = {"width": 512, "heads": 8, "context": 64, "batch": 8, "rounds": 1, "every": every, "data": args.data}
    case = Case(2, "fsdp2", "standard", 2, **wide)
    result = run([case])[case]
    print(f"Counted on a transformer of width 512 after {2 * every} steps, FSDP2 on 2 processes:\n")
    print("| | matrices | block steps, mean | least | most |\n|---|---|---|---|---|")
    for purpose, steps in result["steps"].items():
        print(f"| {purpose} | {len(steps)} | {statistics.mean(steps):.1f} | {min(steps)} | {max(steps)} |")
    trained = {purpose: statistics.mean(steps) for purpose, steps in result["steps"].items()}
    first_order = traffic(result["shapes"], trained, True, 2 * 8 * 64, layers=result["layers"])
    print(f"\n{result['collectives']} collectives. The formulas against what was counted, MB:\n")
    print("| " + " | ".join(["", *PURPOSES, "all"]) + " |\n" + "|---" * (len(PURPOSES) + 2) + "|")
    for name, sizes in (("formulas", first_order), ("counted", result["by"])):
        values = [*(sizes[purpose] for purpose in PURPOSES), sum(sizes.values())]
        print(f"| {name} | " + " | ".join(f"{value / 1e6:.2f}" for value in values) + " |")
    gaussian = []
    for m, n in ((4096, 4096), (11008, 4096), (512, 4096)) if not args.quick else ((1024, 1024),):
        A = torch.randn(1, m, n, generator=torch.Generator().manual_seed(0))
        gaussian.append(1 + (spectral_estimate(A).passes - 1) // 2)  # processes hear of the end a step later
        print(f"Gaussian {m} x {n}: {gaussian[-1]} block steps", file=sys.stderr, flush=True)
    extra = result["collectives"] - result["path"]
    print(f"\nGaussian matrices of full size, 4096 x 4096, 11008 x 4096 and 512 x 4096: {gaussian} block steps.")
    print(f"Collectives besides those of the longest Lanczos: {extra}.\n")
    most = {f"most {purpose}": float(max(steps)) for purpose, steps in result["steps"].items()}
    counts = {"trained": {**trained, **most, "extra": extra}}
    for name, steps in (("Gaussian", float(max(gaussian))), ("limit", float(MAX_STEPS))):
        counts[name] = {**dict.fromkeys(counts["trained"], steps), "extra": extra}
    return counts


def extrapolate(args: argparse.Namespace) -> None:
    """Evaluate the formulas for 7 billion parameters on 64 GPUs."""
    shapes, ranks, rows_seen = llama(), 64, 64 * 4096
    parameters = sum(m * n for m, n, _ in shapes)
    link, latency = args.link * 1e9, args.latency * 1e-6
    counts = counted_steps(args)
    print(f"{parameters / 1e9:.2f} billion entries in {len(shapes)} matrices, {ranks} processes.\n")
    print("| way | block steps | collectives | " + " | ".join(f"{p}, MB" for p in PURPOSES[:-1]), end="")
    print(f" | all, MB | sums, ms at {args.link:g} GB/s and {args.latency:g} us each |")
    print("|---" * (len(PURPOSES) + 4) + "|")
    for name, steps in counts.items():
        for way, sharded in (("FSDP2, HSDP 8 x 8", True), ("DDP", False)):
            for tier in ("standard", "light"):
                sent = traffic(shapes, steps, sharded, rows_seen, tier)
                total = sum(sent.values())
                asking = (["matrices"] if sharded else []) + (["rows"] if tier == "standard" else [])
                collectives = int(steps["extra"] + 2 * max((steps[f"most {p}"] for p in asking), default=0))
                seconds = 2 * (ranks - 1) / ranks * total / link + collectives * latency
                cells = [f"{way}, {tier}", name, collectives, *(f"{sent[p] / 1e6:.0f}" for p in PURPOSES[:-1])]
                cells += [f"{total / 1e6:.0f}", f"{seconds * 1e3:.0f}"]
                print("| " + " | ".join(map(str, cells)) + " |")
    reads = {name: 2 * KINDS * steps["matrices"] for name, steps in counts.items()}
    print("\nReads of what a process holds of the matrices (W, dW and drift together, two a block step): ", end="")
    print(", ".join(f"{name} {count:.0f}" for name, count in reads.items()), end="; ")
    print(f"of {4 * parameters / ranks / 1e9:.2f} GB in float32 each.")
    bases = sum(4 * (MAX_STEPS + 1) * BLOCK * min(m, n) for m, n, _ in shapes)
    print(f"Krylov bases of W, dW and drift, the same in every process: at most {KINDS * bases / 1e9:.1f} GB.")
    print(
        f"Weights in bfloat16, gathered by any forward under FSDP2, the extra one too: {2 * parameters / 1e9:.0f} GB."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=None, help="text file to train on; without one the licence text")
    parser.add_argument("--quick", action="store_true", help="fewer training steps, smaller Gaussian matrices")
    parser.add_argument("--link", type=float, default=50.0, help="assumed: GB/s a GPU sends to the next one")
    parser.add_argument("--latency", type=float, default=100.0, help="assumed: microseconds of one collective")
    args = parser.parse_args()
    begin = time.perf_counter()
    extrapolate(args)
    print(f"\n{os.cpu_count()} CPU cores, gloo, torch {torch.__version__}; {time.perf_counter() - begin:.0f} s.")


if __name__ == "__main__":
    main()
