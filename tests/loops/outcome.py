"""What came of a cell of the matrix: was training the same, and what was measured; the table in the docs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache

from tqdm.auto import tqdm

from spectral_monitor import SpectralMonitor
from tests.loops.ways import COMPILED, LOOPS, PRECISIONS, Cell, cells, train
from tests.noninterference.recorder import differences

GROUPS = {
    "weights": ("weight_norm", "weight_stable_rank", "drift_ratio"),
    "updates": ("update_norm", "update_natural", "update_ratio", "lr"),
    "contributions": ("contribution",),
    "features": ("feature_rms", "alignment", "update_alignment", "input_stable_rank", "backward_stable_rank"),
    "feature changes": ("feature_change",),
}
NOISE = "_torchdynamo_wrapper_id"  # a counter of torch's, another in every run
ROUNDED = "its change is too close to the rounding of its outputs"


@dataclass
class Outcome:
    """Of one cell: differences from the run without the monitor, measured steps, and what is missing and why.

    Or the sentence with which the monitor refused before the first step.
    """

    differences: list[tuple[str, str]] = field(default_factory=list)
    tensors: int = 0
    steps: list[int] = field(default_factory=list)
    refusal: str = ""
    missing: dict[str, set[str]] = field(default_factory=dict)


@cache
def outcome(cell: Cell) -> Outcome:
    """Train with and without the monitor."""
    if cell.refused:
        try:
            train(cell, SpectralMonitor(every_n_steps=1))
        except ValueError as error:
            return Outcome(refusal=str(error))
    reference, _ = train(cell)
    monitor = SpectralMonitor(every_n_steps=1)
    run, _ = train(cell, monitor)
    found = [item for item in differences(reference, run) if not item[1].endswith(NOISE)]
    result = Outcome(found, run.tensors(), [m.step for m in monitor.measurements])
    for group, keys in GROUPS.items():
        reasons = {
            m.why(key, info.name) or "no reason"
            for m in monitor.measurements
            for info in m.layers
            for key in keys
            if info.role != "vector" and math.isnan(m.value(key, info.name))
        }
        if reasons:
            result.missing[group] = reasons
    return result


def table() -> str:
    """The matrix as markdown: a row per loop and compilation, a column per precision."""
    notes: list[str] = []
    outcomes = {cell: outcome(cell) for cell in tqdm(cells(), desc="loops")}

    def entry(loop: str, precision: str, compiled: str) -> str:
        texts = []
        for accumulate in (1, 3):
            cell = Cell(loop, precision, accumulate, compiled)
            if cell in outcomes:
                texts.append(_entry(outcomes[cell], cell, notes))
            elif cell.impossible() not in texts:
                texts.append(f"n/a{_note(cell.impossible(), notes)}")
        return " / ".join(dict.fromkeys(texts))

    lines = ["| loop | compiled | " + " | ".join(PRECISIONS) + " |", "|---" * (len(PRECISIONS) + 2) + "|"]
    for loop in LOOPS:
        for compiled in COMPILED:
            entries = [entry(loop, precision, compiled) for precision in PRECISIONS]
            lines.append(f"| {loop} | {compiled} | " + " | ".join(entries) + " |")
    footnotes = [f"{number}. {note}" for number, note in enumerate(notes, 1)]
    return "\n".join([*lines, "", *footnotes])


def _note(text: str, notes: list[str]) -> str:
    if text not in notes:
        notes.append(text)
    return f" ({notes.index(text) + 1})"


def _entry(found: Outcome, cell: Cell, notes: list[str]) -> str:
    if found.refusal:
        return f"refused{_note(found.refusal, notes)}"
    if found.differences or found.steps != cell.steps:
        return "**fails**"
    lacking = [
        f"{group}: {reason}" for group, reasons in found.missing.items() for reason in sorted(reasons - {ROUNDED})
    ]
    return "all" if not lacking else "all but" + "".join(_note(text, notes) for text in lacking)
