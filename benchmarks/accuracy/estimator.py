"""How good spectral norms are: error, bounds and passes over the matrix on a battery of more than 200 matrices.

Every norm is compared with the float64 singular values. Beside it stand plain power iteration with the same number
of passes, and 8 steps of single-vector Lanczos (17 passes). The exit status is 1 if a norm is off by more than 1 %,
or if the truth is outside the bounds, or if no singular value is as close to the norm as its error bound says.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm.auto import tqdm

from benchmarks.accuracy.matrices import NORMAL, Case, singular_values, specs
from benchmarks.sections import write
from spectral_monitor.functional import spectral_norm_bounds
from spectral_monitor.linalg import ShardedStack, compute_dtype, run_local, spectral_estimate, tame

LANCZOS_STEPS = 8
ALIGN_LEFT = 4  # so many columns are words


class Row(NamedTuple):
    """What was found for one matrix; errors are relative."""

    case: Case
    truth: float
    error: float
    bound: float
    high: float
    passes: int
    power: float
    lanczos: float
    good: bool

    def cells(self) -> list[str]:
        A = self.case.matrix
        words = [self.case.family, self.case.name, "x".join(map(str, A.shape)), str(A.dtype).removeprefix("torch.")]
        errors = [f"{100 * self.error:.4f}", f"{100 * self.bound:.3f}", f"{self.high:.4g}", str(self.passes)]
        others = [f"{100 * self.power:.2f}", "-" if math.isnan(self.lanczos) else f"{100 * self.lanczos:.2f}"]
        return [*words, f"{self.truth:.5g}", *errors, *others, "pass" if self.good else "FAIL"]


COLUMNS = ["family", "matrix", "shape", "dtype", "truth", "error %", "bound %", "high/truth", "passes"]
COLUMNS += ["power %", f"{LANCZOS_STEPS} Lanczos %", ""]


def power_iteration(A: Tensor, passes: int) -> float:
    """The usual way, reading the matrix as often."""
    (tamed,), _, scale, _ = run_local(tame([ShardedStack.whole(A.unsqueeze(0).to(compute_dtype(A.dtype)))]))
    A = tamed.parts[0].A
    v = torch.randn(A.shape[2], generator=torch.Generator().manual_seed(0)).to(A)
    for _ in range(max(1, (passes - 1) // 2)):
        v = A[0].T @ (A[0] @ (v / v.norm()))
    return float((A[0] @ (v / v.norm())).norm()) * float(scale)


def single_lanczos(A: Tensor) -> float:
    """A fixed number of steps from one start vector; NaN where the matrix is too small for as many."""
    if min(A.shape) <= LANCZOS_STEPS:
        return math.nan
    (tamed,), _, scale, _ = run_local(tame([ShardedStack.whole(A.unsqueeze(0).to(compute_dtype(A.dtype)))]))
    A = tamed.parts[0].A[0]
    v = torch.randn(A.shape[1], generator=torch.Generator().manual_seed(0)).to(A)
    basis = (v / v.norm()).unsqueeze(0)
    for _ in range(LANCZOS_STEPS - 1):
        v = image = A.T @ (A @ basis[-1])
        for _ in range(2):  # once leaves rounding
            v = v - basis.T @ (basis @ v)
        if v.norm() <= 1e-6 * image.norm():  # nothing is left to be found
            break
        basis = torch.cat([basis, (v / v.norm()).unsqueeze(0)])
    return float(torch.linalg.matrix_norm(A @ basis.T, 2)) * float(scale)


def measure(case: Case) -> Row:
    values = singular_values(case.matrix)
    truth = float(values[0])
    estimate = spectral_estimate(case.matrix.unsqueeze(0))
    sigma, low, bound, high = (
        float(x) for x in (estimate.sigma, estimate.sigma_low, estimate.error_bound, estimate.sigma_high)
    )
    certain_low, certain_high = (float(x) for x in spectral_norm_bounds(case.matrix))
    good = low <= truth <= high and certain_low <= truth <= certain_high
    good &= abs(sigma - truth) <= 0.01 * truth and float((values - sigma).abs().min()) <= bound
    power, lanczos = power_iteration(case.matrix, estimate.passes), single_lanczos(case.matrix)
    if not truth:
        return Row(case, truth, sigma, bound, 1 + high, estimate.passes, 0.0, 0.0, good)
    power, lanczos = abs(power / truth - 1), abs(lanczos / truth - 1)
    return Row(case, truth, abs(sigma / truth - 1), bound / truth, high / truth, estimate.passes, power, lanczos, good)


def summary(rows: list[Row]) -> list[list[str]]:
    families: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        families[row.case.family].append(row)
    table = []
    for name, group in [*families.items(), ("all", rows)]:
        passes = statistics.median(row.passes for row in group)
        cells = [name, str(len(group)), str(sum(not row.good for row in group)), f"{passes:.0f}"]
        cells += [str(max(row.passes for row in group)), f"{100 * max(row.error for row in group):.3f}"]
        for other in ("power", "lanczos"):
            errors = [e for e in (getattr(row, other) for row in group) if not math.isnan(e)] or [0.0]
            cells += [f"{100 * max(errors):.2f}", str(sum(e > 0.01 for e in errors))]
        table.append(cells)
    return table


SUMMARY = ["family", "matrices", "failed", "median passes", "most passes", "worst error %"]
SUMMARY += ["power: worst %", "over 1 %", f"{LANCZOS_STEPS} Lanczos: worst %", "over 1 %"]


def shown(header: list[str], table: list[list[str]], words: int, markdown: bool) -> str:
    if markdown:
        lines = ["| " + " | ".join(header) + " |", "|" + "---|" * words + "---:|" * (len(header) - words)]
        return "\n".join([*lines, *("| " + " | ".join(cells) + " |" for cells in table)])
    widths = [max(map(len, column)) for column in zip(header, *table, strict=True)]
    lines = []
    for cells in (header, *table):
        columns = enumerate(zip(cells, widths, strict=True))
        lines.append("  ".join(c.ljust(w) if i < words else c.rjust(w) for i, (c, w) in columns).rstrip())
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"leave out what is wider than {NORMAL}")
    parser.add_argument("--markdown", action="store_true", help="print Markdown, for the documentation")
    parser.add_argument("--write", metavar="PAGE", help="write the summary into a page")
    parser.add_argument("--summary", action="store_true", help="print the summary only")
    parser.add_argument(
        "--threads", type=int, default=1, help="CPU threads; 1 is best where cores are shared (default)"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    for spec in tqdm(specs(NORMAL) if args.quick else specs(), unit="spec", file=sys.stderr):
        rows += [measure(case) for case in spec.cases()]
    rows.sort(key=lambda row: row.case.family)
    if not args.summary:
        print(shown(COLUMNS, [row.cells() for row in rows], ALIGN_LEFT, args.markdown) + "\n")
    print(shown(SUMMARY, summary(rows), 1, args.markdown))
    failed = sum(not row.good for row in rows)
    count_text = f"{len(rows)} matrices, {failed} failed"
    print(f"\n{count_text}")
    if args.write:
        width = f"up to {NORMAL if args.quick else max(max(row.case.matrix.shape) for row in rows)} wide"
        machine = f"torch {torch.__version__.partition('+')[0]}, {time.strftime('%Y-%m-%d')}, two cores"
        text = f"{shown(SUMMARY, summary(rows), 1, markdown=True)}\n\n{count_text}, {width}; {machine}."
        write(Path(args.write), "battery", text)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
