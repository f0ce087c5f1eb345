"""The answer in a sentence, the same everywhere: console, progress bar, TensorBoard, W&B and the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from spectral_monitor.condition.verdict import Verdict
from spectral_monitor.measurement import HEALTHY, NOT_JUDGED, OFF, Measurement
from spectral_monitor.messages import joined
from spectral_monitor.reporting.content.families import folded_names
from spectral_monitor.reporting.content.labels import unprefixed
from spectral_monitor.reporting.content.tally import Tally, followers, named_by, tally

MAX_NAMES = 3
"""The most layers, or reasons, that a sentence names."""
MAX_BRIEF_LENGTH = 14
"""Characters of the shortest form of the answer, at most: more do not fit a progress bar."""
MAX_ROOTS = 3
"""The most root verdicts with a line of their own."""
_SHORT = {"rates_too_small": "rates too low"}
"""Causes that are longer than that -> shorter words."""


def headline(measurement: Measurement) -> str:
    """Return the answer on one line.

    Example:
        >>> from spectral_monitor import LayerInfo
        >>> from spectral_monitor.measurement import LayerState
        >>> layers = tuple(LayerInfo(name, "operator", 8, 8, (8, 8)) for name in "abc")
        >>> states = {"a": LayerState("healthy"), "b": LayerState("healthy"), "c": LayerState("not judged", "frozen")}
        >>> headline(Measurement(50, layers, {}, {"violations": 0.0}, states=states))
        '2 of 3 layers healthy, 1 not judged: frozen'
    """
    return "; ".join(headlines(measurement))


def headlines(measurement: Measurement) -> list[str]:
    """Return the answer: a line for each verdict on the whole network, then one for the layers.

    The last line is left out if the network has a verdict and no layer was judged.
    """
    count = tally(measurement)
    lines = [verdict.sentence for verdict in count.network]
    return [*lines, _layers(measurement, count)] if count.judged or not lines else lines


def brief(measurement: Measurement) -> str:
    """Return the answer in at most 14 characters: ``"OK"``, ``"2 off"``, ``"diverged"`` or ``"not judged"``.

    Example:
        >>> from spectral_monitor import LayerInfo
        >>> brief(Measurement(50, (LayerInfo("head", "readout", 10, 64, (10, 64)),), {}, {}))
        'not judged'
    """
    count = tally(measurement)
    if count.network:
        cause = count.network[0].cause
        words = _SHORT.get(cause, cause.replace("_", " "))
        return words if len(words) <= MAX_BRIEF_LENGTH else "network off"
    return {HEALTHY: "OK", OFF: f"{len(count.off) or len(count.disturbed)} off"}.get(count.state, NOT_JUDGED)


def announcement(verdict: Verdict, measurement: Measurement) -> str:
    """Return the warning when a root verdict begins: its layers, its sentence and how many layers follow from it.

    Example:
        >>> root = Verdict("head", "lr", 0.1, (0.0, 1.0), 98.0, 20, 3, "lr_too_large", "its learning rate is too large")
        >>> announcement(root, Measurement(30, (), {}, {}, (root,)))
        'step 30: head: its learning rate is too large'
    """
    return f"step {measurement.step}: {_root_line(verdict, measurement)}"


def root_lines(measurement: Measurement) -> list[str]:
    """Return a line for each root verdict on layers, the worst first; if there are many, the last line counts the rest.

    Example:
        >>> root = Verdict("head", "lr", 0.1, (0.0, 1.0), 98.0, 20, 3, "lr_too_large", "its learning rate is too large")
        >>> root_lines(Measurement(30, (), {}, {}, (root,)))
        ['head: its learning rate is too large']
    """
    roots = [root for root in measurement.roots if named_by(root)]
    lines = [_root_line(root, measurement, name_followers=True) for root in roots[:MAX_ROOTS]]
    others = len(roots) - MAX_ROOTS
    return [*lines, f"and {others} more cause{'s' if others > 1 else ''}"] if others > 0 else lines


def lifted_line(measurements: Iterable[Measurement], last: Measurement) -> str:
    """Return a line on the causes of earlier verdicts that the last measurement no longer has; empty if there are none.

    Example:
        >>> root = Verdict("head", "lr", 0.1, (0.0, 1.0), 98.0, 20, 3, "lr_too_large", "its learning rate is too large")
        >>> steps = [Measurement(step, (), {}, {}, (root,) if step in (8, 16) else ()) for step in (4, 8, 16, 32)]
        >>> lifted_line(steps, steps[-1])
        'no longer: lr too large (head, steps 8 to 16)'
    """
    current = {root.cause for root in last.roots}
    lifted: dict[str, tuple[dict[str, None], list[int]]] = {}
    for measurement in measurements:
        for root in measurement.roots:
            if root.cause not in current and measurement.step <= last.step:
                layers, steps = lifted.setdefault(root.cause, ({}, []))
                layers.update(dict.fromkeys(named_by(root)))
                steps.append(measurement.step)
    parts = []
    for cause, (layers, steps) in lifted.items():
        names = names_in(last, layers) if len(layers) > 1 else "".join(_bare(last, layers))
        when = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
        parts.append(f"{cause.replace('_', ' ')} ({', '.join(filter(None, (names, when)))})")
    return f"no longer: {'; '.join(parts)}" if parts else ""


def _root_line(root: Verdict, measurement: Measurement, name_followers: bool = False) -> str:
    """Return the layers of a root, its sentence, and how many layers follow from it, with their names or not."""
    names = named_by(root)
    layers = names_in(measurement, names) if len(names) > MAX_NAMES else ", ".join(_bare(measurement, names))
    text = f"{each_of(names)}{layers}: {root.sentence}" if layers else root.sentence
    follow = followers(root, measurement)
    if not follow:
        return text
    noun = "other layer" if layers else "layer"
    count = f"1 {noun} is" if len(follow) == 1 else f"{len(follow)} {noun}s are"
    ending = f": {names_in(measurement, follow)}" if name_followers else "."
    return f"{text.removesuffix('.')}. {count} disturbed by it{ending}"


def each_of(names: Sequence[str]) -> str:
    """Return what precedes the names of several layers, because the sentence of a verdict speaks of one layer."""
    return "each of " if len(names) > 1 else ""


def following(root: Verdict, measurement: Measurement) -> str:
    """Return how many layers follow from a root, and their names; empty if none does."""
    follow = followers(root, measurement)
    return f"+{len(follow)} that follow from it: {names_in(measurement, follow)}" if follow else ""


def names_in(measurement: Measurement, layers: Iterable[str]) -> str:
    """Return names without the prefix that all layers share, the layers of a family together.

    Example:
        >>> from spectral_monitor import LayerInfo
        >>> names = [*(f"model.h.{i}.mlp" for i in range(12)), "model.head"]
        >>> layers = tuple(LayerInfo(name, "operator", 8, 8, (8, 8)) for name in names)
        >>> names_in(Measurement(5, layers, {}, {}), names[3:])
        'h.*.mlp x9, head'
    """
    return joined(folded_names(_bare(measurement, layers)), 2 * MAX_NAMES)


def _bare(measurement: Measurement, layers: Iterable[str]) -> list[str]:
    """Return names without the prefix that all layers share."""
    bare = unprefixed(tuple(info.name for info in measurement.layers))
    return [bare.get(layer, layer) for layer in layers]


def _layers(measurement: Measurement, count: Tally) -> str:
    """Return the sentence on the layers."""
    if not count.judged:
        return f"{NOT_JUDGED}: {_reasons(count) or 'no matrix was measured'}"
    parts = []
    if count.off:
        names = joined(_bare(measurement, count.off), MAX_NAMES)
        parts.append(f"{len(count.off)} of {count.layers} layers off: {names}")
        if count.disturbed:
            parts.append(f"{len(count.disturbed)} disturbed by {'it' if len(count.off) == 1 else 'them'}")
    elif count.disturbed:
        parts.append(f"{len(count.disturbed)} of {count.layers} layers disturbed")
    elif count.network:
        parts.append("no single layer is at fault")
    elif count.healthy == count.layers:
        parts.append(f"all {count.layers} layers healthy" if count.layers > 1 else "the only layer is healthy")
    else:
        parts.append(f"{count.healthy} of {count.layers} layers healthy")
    if (count.off or count.disturbed) and count.healthy:
        parts.append(f"{count.healthy} healthy")
    if count.not_judged:
        parts.append(f"{count.layers - count.judged} {NOT_JUDGED}: {_reasons(count)}".removesuffix(": "))
    answer, *details = parts
    return ("; " if count.off else ", ").join(filter(None, (answer, ", ".join(details))))


def _reasons(count: Tally) -> str:
    """Return why layers were not judged; with the number of layers if there are several reasons."""
    if len(count.not_judged) < 2:
        return next(iter(count.not_judged), "")
    reasons = [f"{len(layers)} {reason or 'without a reason'}" for reason, layers in count.not_judged.items()]
    others = sum(map(len, list(count.not_judged.values())[MAX_NAMES:]))
    return ", ".join([*reasons[:MAX_NAMES], *([f"{others} for other reasons"] if others else [])])
