"""What the judge says of recorded runs, held against what is known of them."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from benchmarks.recipes.recipe import Fault
from benchmarks.recipes.run import Record
from spectral_monitor.condition import NETWORK, Judge, SpectralCondition, Verdict


@dataclass(frozen=True)
class ReportedRoot:
    """A root as it is reported: at its first step, in its latest words.

    Attributes:
        step: at which it began.
        at: number of the measurement, from 1.
        verdict: as it stood at the first step.
        last: as it stood at the last step that it was a root.
    """

    step: int
    at: int
    verdict: Verdict
    last: Verdict


def judged(record: Record, condition: SpectralCondition | None = None) -> list[ReportedRoot]:
    """Return every root of a run, in the order in which they began."""
    judge = Judge(condition or SpectralCondition(), record.tied)
    roots: dict[tuple[str, str], ReportedRoot] = {}
    for at, (measurement, settings) in enumerate(zip(record.measurements, record.settings, strict=True), 1):
        for verdict in judge.judge(measurement, settings):
            if verdict.is_root:
                key = (verdict.layer, verdict.cause)
                first = roots.get(key, ReportedRoot(measurement.step, at, verdict, verdict))
                roots[key] = ReportedRoot(first.step, first.at, first.verdict, verdict)
    return list(roots.values())


def right(fault: Fault, roots: list[ReportedRoot]) -> ReportedRoot | None:
    """Return the first root that names a right cause, of a right layer where layers are to blame."""
    return next((root for root in roots if names(fault, root.last) or names(fault, root.verdict)), None)


def names(fault: Fault, verdict: Verdict) -> bool:
    """Return whether a verdict names the fault."""
    if verdict.cause not in fault.causes:
        return False
    if not fault.layers or verdict.layer == NETWORK:
        return True
    return any(fnmatchcase(layer, pattern) for layer in (verdict.layer, *verdict.layers) for pattern in fault.layers)
