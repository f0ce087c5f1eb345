"""``spectral-monitor compare``: differences between two runs, layer by layer."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from spectral_monitor.cli.commands.report import check_target, wrote
from spectral_monitor.cli.parser import add_layer, add_run, command
from spectral_monitor.cli.reading import matching, records
from spectral_monitor.condition.verdict import NETWORK, Verdict
from spectral_monitor.measurement import Measurement
from spectral_monitor.reporting.content.tally import JUDGED_BY, latest_judged, off
from spectral_monitor.reporting.text.lines import Column, aligned, printable, text_column
from spectral_monitor.suggestions import unknown

MAX_ROWS = 20
"""Rows without ``--all``, for the layers that differ most."""
MIN_DIFFERENCE = 1.5
"""Ratio of two values from which on they count as different."""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = command(
        commands,
        _compare,
        "compare",
        "Compare one quantity of every layer in two runs at the last step that both have measured: values and the "
        "ratio B / A, the largest difference first. The first line names the layer to look at.",
        "examples:\n  spectral-monitor compare lightning_logs/version_0 lightning_logs/version_1\n"
        "  spectral-monitor compare good bad --quantity feature_change -o both.html",
    )
    add_run(parser, "a", "A")
    add_run(parser, "b", "B")
    parser.add_argument("--quantity", metavar="KEY", help=f"default: {JUDGED_BY[0]}")
    add_layer(parser)
    parser.add_argument("--step", type=int, metavar="N", help="the measurements of this optimizer step")
    parser.add_argument("--all", action="store_true", help=f"a row for every layer, not only for {MAX_ROWS}")
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
    a, b, steps = _pair(*runs, key, args.step)
    pairs = _values(a, b, key)
    selected = matching(args.layer, pairs)
    pairs = {name: pair for name, pair in pairs.items() if name in selected}
    judged = [
        latest_judged([record for record in run if record.step <= measurement.step]) or measurement
        for run, measurement in zip(runs, (a, b), strict=True)
    ]
    names = sorted(pairs, key=lambda name: -_distance(pairs[name]))
    first_line = printable(answer(judged[0], judged[1], key, pairs, names))
    lines = [first_line, f"A: {args.a}", f"B: {args.b}", f"{key}, {steps}", *_table(names, pairs, judged, args.all)]
    print("\n".join(lines))
    if args.output is not None:
        from spectral_monitor.reporting.html.compare import write_comparison
        from spectral_monitor.reporting.logged_run import load

        write_comparison(load(args.a), load(args.b), (str(args.a), str(args.b)), lines, args.output)
        print(wrote(args.output))


def answer(
    a: Measurement, b: Measurement, key: str, pairs: dict[str, tuple[float, float]], names: Sequence[str]
) -> str:
    """Return the first line: what is off in one run only, else the layer that differs most.

    ``pairs``: layer -> the quantity ``key`` in both runs; ``names``: the layers, the largest difference first.
    """
    faults = {"A": _faults(a), "B": _faults(b)}
    one_sided = [
        (run, verdict)
        for run, other in (("B", "A"), ("A", "B"))
        for fault, verdict in faults[run].items()
        if fault not in faults[other]
    ]
    if one_sided:
        run, verdict = one_sided[0]
        layer = "the network" if verdict.layer == NETWORK else verdict.layer
        others = len({(side, v.cause, v.layer) for side, v in one_sided}) - 1
        return f"{layer} is off in {run} only: {verdict.sentence}" + (f" (and {others} more)" if others else "")
    if not names or _distance(pairs[names[0]]) < 0:
        return f"nothing can be compared: {key} is NaN in both runs"
    first = names[0]
    distance, (x, y) = _distance(pairs[first]), pairs[first]
    if math.isinf(distance):
        return f"{first} differs most: {key} is {short(x)} in A and {short(y)} in B"
    factor = math.exp(distance)
    if factor < MIN_DIFFERENCE:
        if short(factor) == "1":
            return f"{key} is the same in every layer"
        return f"no layer's {key} differs by more than {short(factor)}x"
    return f"{first} differs most: {key} is {short(factor)}x {'larger' if abs(y) > abs(x) else 'smaller'} in B"


def _faults(record: Measurement) -> dict[tuple[str, str], Verdict]:
    """Return (layer, cause) -> verdict, for each layer of each root."""
    return {(layer, root.cause): root for root in record.roots for layer in (root.layers or (root.layer,))}


def _quantity(requested: str | None, *runs: Sequence[Measurement]) -> str:
    """Return the quantity to compare; raise a ValueError if a run lacks it."""
    a, b = (dict.fromkeys(key for record in run for key in record.values) for run in runs)
    common = [key for key in a if key in b]
    if not common:
        raise ValueError(f"the runs have no quantity in common: A has {', '.join(a)}; B has {', '.join(b)}")
    if requested is None:
        return next((key for key in JUDGED_BY if key in common), common[0])
    for run, keys in (("A", a), ("B", b)):
        if requested in keys and requested not in common:
            raise ValueError(f"--quantity {requested!r} is not in both runs; only {run} has it")
    if requested not in common:
        raise ValueError(unknown("quantity", requested, common))
    return requested


def _pair(
    a: Sequence[Measurement], b: Sequence[Measurement], key: str, step: int | None
) -> tuple[Measurement, Measurement, str]:
    """Return a measurement of each run, and their steps in words; raise a ValueError if the step is not in both."""
    a_steps, b_steps = ({record.step: record for record in run if key in record.values} for run in (a, b))
    common = sorted(a_steps.keys() & b_steps.keys())
    if step is not None and step not in common:
        hint = (
            f"nearest {min(common, key=lambda other: abs(other - step))}" if common else "they have no step in common"
        )
        raise ValueError(f"{key} was not measured at step {step} in both runs; {hint}")
    if common:
        shared = common[-1] if step is None else step
        return a_steps[shared], b_steps[shared], f"step {shared}"
    a_last, b_last = max(a_steps), max(b_steps)
    return a_steps[a_last], b_steps[b_last], f"step {a_last} of A and step {b_last} of B, because they share no step"


def _values(a: Measurement, b: Measurement, key: str) -> dict[str, tuple[float, float]]:
    """Return layer -> the quantity in both runs, for the matrices of both; raise a ValueError if there are none."""
    a_values, b_values = (
        {
            info.name: value
            for info, value in zip(record.layers, record.values[key].tolist(), strict=True)
            if info.is_matrix
        }
        for record in (a, b)
    )
    common = {name: (value, b_values[name]) for name, value in a_values.items() if name in b_values}
    if not common:
        a_first, b_first = next(iter(a_values), "none"), next(iter(b_values), "none")
        raise ValueError(f"the runs have no layer in common: A begins with {a_first!r}, B with {b_first!r}")
    return common


def _distance(pair: tuple[float, float]) -> float:
    """Return the absolute logarithm of the ratio of two numbers.

    It is -1 where both are NaN, and infinite where the ratio is undefined or not positive.
    """
    a, b = pair
    if math.isnan(a) and math.isnan(b):
        return -1.0
    if a == b:
        return 0.0
    has_ratio = all(0 < abs(x) < math.inf for x in pair) and a * b > 0
    return abs(math.log(b / a)) if has_ratio else math.inf


def _table(
    names: Sequence[str], pairs: dict[str, tuple[float, float]], judged: Sequence[Measurement], show_all: bool
) -> list[str]:
    shown = names if show_all else names[:MAX_ROWS]
    off_layers = {run: set(off(record)) for run, record in zip("AB", judged, strict=True)}
    runs_off = [" and ".join(run for run, layers in off_layers.items() if name in layers) for name in shown]
    a, b = zip(*(pairs[name] for name in shown), strict=True)
    ratios = [y / x if x else math.nan for x, y in zip(a, b, strict=True)]
    numbers = {"A": a, "B": b, "B / A": ratios}
    columns = [text_column("layer", shown)]
    columns += [Column(title, tuple(map(short, column))) for title, column in numbers.items()]
    lines = aligned([*columns, text_column("off in", runs_off)] if any(runs_off) else columns)
    if len(shown) < len(names):
        largest = max(_distance(pairs[name]) for name in names[len(shown) :])
        bound = f", none by more than {short(math.exp(largest))}x" if largest >= 0 else ""
        lines.append(f"+{len(names) - len(shown)} that differ less{bound}: --all shows them")
    return lines


def short(value: float) -> str:
    """Return three digits of a number, a dash for NaN.

    Example:
        >>> short(0.012345), short(12345.0), short(math.nan)
        ('0.0123', '1.23e+04', '-')
    """
    return "-" if math.isnan(value) else f"{value:.3g}"
