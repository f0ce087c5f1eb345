"""``spectral-monitor compare``: what is different between two runs, layer by layer."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from spectral_monitor.cli.commands.report import check_target, wrote
from spectral_monitor.cli.parser import add_layer, add_run, command
from spectral_monitor.cli.reading import find_file, matching, records
from spectral_monitor.condition.verdict import NETWORK, Verdict
from spectral_monitor.measurement import Measurement
from spectral_monitor.reporting.content.tally import JUDGED_BY, latest_judged, off
from spectral_monitor.reporting.text.lines import Column, aligned, printable, text_column
from spectral_monitor.suggestions import unknown

MAX_ROWS = 20
"""Rows, of the layers that differ most, without ``--all``."""
ALIKE = 1.5
"""Factor below which nobody calls two runs different."""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = command(
        commands,
        _compare,
        "compare",
        "Print one quantity of every layer in two runs and the ratio B / A, the largest difference first,\n"
        "at the last step that both have measured. The first line names the layer to look at.",
        "examples:\n  spectral-monitor compare lightning_logs/version_0 lightning_logs/version_1\n"
        "  spectral-monitor compare good bad --quantity feature_change -o both.html",
    )
    add_run(parser, "a", "A")
    add_run(parser, "b", "B")
    parser.add_argument("--quantity", metavar="KEY", help=f"default: {JUDGED_BY[0]}")
    add_layer(parser)
    parser.add_argument("--step", type=int, metavar="N", help="the measurements of this optimizer step")
    parser.add_argument("--all", action="store_true", help=f"a row for every layer, not for {MAX_ROWS} of them")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write a page with the curves of both; needs plotly"
    )


def _compare(args: argparse.Namespace) -> None:
    if args.output is not None:
        from spectral_monitor.reporting.html.page import need_plotly

        need_plotly("a page")
        check_target(args.output)
    runs = records(args.a), records(args.b)
    key = _quantity(args.quantity, *runs)
    a, b, said = _pair(*runs, key, args.step)
    pairs = _values(a, b, key)
    kept = matching(args.layer, pairs)
    pairs = {name: pair for name, pair in pairs.items() if name in kept}
    judged = [
        latest_judged([record for record in run if record.step <= of.step]) or of
        for run, of in zip(runs, (a, b), strict=True)
    ]
    names = sorted(pairs, key=lambda name: -_distance(pairs[name]))
    told = printable(answer(judged[0], judged[1], key, pairs, names))
    lines = [told, f"A: {args.a}", f"B: {args.b}", f"{key}, {said}"]
    lines += _table(names, pairs, judged, args.all)
    print("\n".join(lines))
    if args.output is not None:
        from spectral_monitor.reporting.html.compare import write_comparison
        from spectral_monitor.reporting.logged_run import read_run

        a_run, b_run = (read_run(find_file(place, quiet=True)) for place in (args.a, args.b))
        write_comparison(a_run, b_run, (str(args.a), str(args.b)), lines, args.output)
        print(wrote(args.output))


def answer(
    a: Measurement, b: Measurement, key: str, pairs: dict[str, tuple[float, float]], names: Sequence[str]
) -> str:
    """Return the first line: what is off in one run only, else the layer that differs most.

    ``pairs``: layer -> its value in both runs; ``names``: of the layers, the largest difference first.
    """
    faults = {"A": _faults(a), "B": _faults(b)}
    only = [
        (run, verdict)
        for run, other in (("B", "A"), ("A", "B"))
        for place, verdict in faults[run].items()
        if place not in faults[other]
    ]
    if only:
        run, verdict = only[0]
        where = "the network" if verdict.layer == NETWORK else verdict.layer
        more = len({(side, v.cause, v.layer) for side, v in only}) - 1
        return f"{where} is off in {run} only: {verdict.sentence}" + (f" (and {more} more)" if more else "")
    if not names or _distance(pairs[names[0]]) < 0:
        return f"nothing can be compared: {key} is NaN in both runs"
    first = names[0]
    apart, (x, y) = _distance(pairs[first]), pairs[first]
    if math.isinf(apart):
        return f"{first} differs most: {key} is {short(x)} in A and {short(y)} in B"
    if apart < math.log(ALIKE):
        return f"no layer's {key} differs by more than {short(math.exp(apart))}x"
    return f"{first} differs most: {key} is {short(math.exp(apart))}x {'larger' if abs(y) > abs(x) else 'smaller'} in B"


def _faults(record: Measurement) -> dict[tuple[str, str], Verdict]:
    """Return what is off by itself: layer and cause -> verdict, for each layer of each root."""
    return {(layer, root.cause): root for root in record.roots for layer in (root.layers or (root.layer,))}


def _quantity(wanted: str | None, *runs: Sequence[Measurement]) -> str:
    """Return the quantity to compare.

    Raises:
        ValueError: not both runs have it.
    """
    a, b = (dict.fromkeys(key for record in run for key in record.values) for run in runs)
    both = [key for key in a if key in b]
    if not both:
        raise ValueError(f"the runs have no quantity in common: A has {', '.join(a)}; B has {', '.join(b)}")
    if wanted is None:
        return next((key for key in JUDGED_BY if key in both), both[0])
    if wanted not in both:
        where = next((f"; only {name} has it" for name, of in (("A", a), ("B", b)) if wanted in of), "")
        raise ValueError(
            f"--quantity {wanted!r} is not in both runs{where}" if where else unknown("quantity", wanted, both)
        )
    return wanted


def _pair(
    a: Sequence[Measurement], b: Sequence[Measurement], key: str, step: int | None
) -> tuple[Measurement, Measurement, str]:
    """Return a measurement of each run, and in words which.

    Raises:
        ValueError: the step was not measured in both.
    """
    found = [{record.step: record for record in run if key in record.values} for run in (a, b)]
    common = sorted(found[0].keys() & found[1].keys())
    if step is not None:
        if step not in common:
            nearest = min(common, key=lambda other: abs(other - step)) if common else None
            raise ValueError(
                f"{key} was not measured at step {step} in both runs"
                + (f"; nearest {nearest}" if nearest is not None else "; they have no step in common")
            )
        return found[0][step], found[1][step], f"step {step}"
    if common:
        return found[0][common[-1]], found[1][common[-1]], f"step {common[-1]}"
    last = [max(steps) for steps in found]
    return found[0][last[0]], found[1][last[1]], f"step {last[0]} of A and {last[1]} of B, for they share none"


def _values(a: Measurement, b: Measurement, key: str) -> dict[str, tuple[float, float]]:
    """Return layer -> the quantity in both runs, of the matrices that both have.

    Raises:
        ValueError: they have none in common.
    """
    sides = [
        {
            info.name: value
            for info, value in zip(record.layers, record.values[key].tolist(), strict=True)
            if info.is_matrix
        }
        for record in (a, b)
    ]
    common = {name: (value, sides[1][name]) for name, value in sides[0].items() if name in sides[1]}
    if not common:
        first = [next(iter(side), "none") for side in sides]
        raise ValueError(f"the runs have no layer in common: A begins with {first[0]!r}, B with {first[1]!r}")
    return common


def _distance(pair: tuple[float, float]) -> float:
    """Return how different two numbers are, as a logarithm; NaN on both sides is least, on one side most."""
    a, b = pair
    if math.isnan(a) and math.isnan(b):
        return -1.0
    if a == b:
        return 0.0
    known = all(0 < abs(x) < math.inf for x in pair)
    return abs(math.log(abs(b / a))) if known and a * b > 0 else math.inf


def _table(
    names: Sequence[str], pairs: dict[str, tuple[float, float]], judged: Sequence[Measurement], every: bool
) -> list[str]:
    shown = names if every else names[:MAX_ROWS]
    sides = [(run, set(off(record))) for run, record in zip("AB", judged, strict=True)]
    where = [" and ".join(run for run, layers in sides if name in layers) for name in shown]
    a, b = zip(*(pairs[name] for name in shown), strict=True)
    ratios = [y / x if x else math.nan for x, y in zip(a, b, strict=True)]
    numbers = {"A": a, "B": b, "B / A": ratios}
    columns = [text_column("layer", shown)]
    columns += [Column(title, tuple(map(short, column))) for title, column in numbers.items()]
    lines = aligned([*columns, text_column("off in", where)] if any(where) else columns)
    if len(shown) < len(names):
        rest = [math.exp(_distance(pairs[name])) for name in names[len(shown) :] if _distance(pairs[name]) >= 0]
        most = f", none by more than {short(max(rest))}x" if rest else ""
        lines.append(f"+{len(names) - len(shown)} that differ less{most}: --all shows them")
    return lines


def short(value: float) -> str:
    """Return three digits of a number, a dash for NaN.

    Example:
        >>> short(0.012345), short(12345.0), short(math.nan)
        ('0.0123', '1.23e+04', '-')
    """
    return "-" if math.isnan(value) else f"{value:.3g}"
