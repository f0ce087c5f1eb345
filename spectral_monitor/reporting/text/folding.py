"""The rows of a table of layers: roots first, layers that follow from them folded, then the others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spectral_monitor.condition.verdict import NETWORK, Verdict
from spectral_monitor.measurement import HEALTHY, NODE, NOT_JUDGED, OFF, Measurement
from spectral_monitor.reporting.content.headline import MAX_ROOTS, names_in
from spectral_monitor.reporting.content.labels import unprefixed
from spectral_monitor.reporting.content.tally import Tally, named_by, tally

DISTURBED = "disturbed"
"""The state of a layer that follows from another one; in a measurement its state is off."""
MAX_UNFOLDED_LAYERS = 16
"""Layers of a network in which each has a row; in larger ones most are folded."""
MAX_HEALTHY_ROWS = 5
"""Healthy layers that keep their row: those furthest from typical."""
MAX_ROWS_OF_CAUSE = 3
"""Rows of the layers of a single cause; if there are several causes, each has two."""


@dataclass(frozen=True)
class Row:
    """One row of a table of layers."""

    layers: tuple[int, ...]  # indices of its layers; several if they are folded
    label: str  # the layer's name, or the number of layers
    state: str  # ``"off"``, ``"disturbed"``, ``"healthy"`` or ``"not judged"``
    verdict: Verdict | None = None  # of the layer, if it has one and is not folded
    remark: str = ""  # text of the last column


def rows(measurement: Measurement, ratios: Sequence[float], folded: bool = True) -> list[Row]:
    """Return the rows of a measurement: every root and below it the layers that follow, then all other layers.

    Args:
        ratios: (L,), every layer over its typical value, NaN if that is not known.
        folded: whether layers that need no row of their own share one.
    """
    return _Rows(measurement, ratios, folded).all()


class _Rows:
    def __init__(self, measurement: Measurement, ratios: Sequence[float], folded: bool) -> None:
        self.measurement, self.ratios, self.folded = measurement, ratios, folded
        self.count: Tally = tally(measurement)
        self.bare = unprefixed(tuple(info.name for info in measurement.layers))
        self.indices = {info.name: i for i, info in enumerate(measurement.layers)}
        self.verdicts: dict[str, Verdict] = {}
        for verdict in measurement.verdicts:
            self.verdicts.setdefault(verdict.layer, verdict)

    def all(self) -> list[Row]:
        """Return every row, in its order."""
        rows: list[Row] = []
        remaining, roots_of = dict.fromkeys(self.count.off), dict(self.count.disturbed)
        shown = self.measurement.roots[:MAX_ROOTS] if self.folded else self.measurement.roots
        for root in shown:
            names = [name for name in named_by(root) if name == root.layer or name in remaining]
            rows += self._same_cause(root, [name for name in names if name in self.indices])
            rows += self._following(root.layer, [name for name, source in roots_of.items() if source == root.layer])
            remaining = {name: None for name in remaining if name not in names}
            roots_of = {name: source for name, source in roots_of.items() if source != root.layer}
        others = [name for name in remaining if name in self.indices]
        if self.folded and len(others) > MAX_ROWS_OF_CAUSE:
            rows.append(self._fold(others, "off", OFF, "other causes"))
        else:
            for name in others:
                reason = self.measurement.states[name].reason if name in self.measurement.states else ""
                rows.append(self._row(name, OFF, self.verdicts.get(name), reason))
        if self.folded and len(self.measurement.roots) > MAX_ROOTS:
            rows += self._following("", list(roots_of))
        else:  # their roots were lifted at this step
            for lifted in dict.fromkeys(roots_of.values()):
                rows += self._following(lifted, [name for name, source in roots_of.items() if source == lifted])
        return rows + self._others() + self._nodes()

    def _same_cause(self, root: Verdict, names: Sequence[str]) -> list[Row]:
        """Return a row for the root's layer and one for each other layer of its cause; if they are many, folded."""
        rows = [
            self._row(name, OFF, root, root.cause.replace("_", " "))
            if name == root.layer
            else self._row(name, OFF, self.verdicts.get(name), "same cause")
            for name in names
        ]
        limit = MAX_ROWS_OF_CAUSE if len(self.measurement.roots) == 1 else 2
        if not self.folded or len(rows) <= limit:
            return rows
        return [*rows[: limit - 1], self._fold(names[limit - 1 :], "off", OFF, "same cause")]

    def _following(self, root: str, names: Sequence[str]) -> list[Row]:
        """Return the rows of layers that follow from a root; folded they share one."""
        names = [name for name in names if name in self.indices]
        if self.folded and len(names) > 1:
            return [self._fold(names, "disturbed", DISTURBED, "by the above" if root else "by others")]
        source = "by the network" if root == NETWORK else f"by {self.label(root)}"
        return [self._row(name, DISTURBED, self.verdicts.get(name), f"disturbed {source}") for name in names]

    def _others(self) -> list[Row]:
        """Return the rows of all other layers: in the order of the network or, folded, the furthest and the rest."""
        off_layers = {*self.count.off, *self.count.disturbed}
        infos = self.measurement.layers
        names = [info.name for info in infos if info.is_matrix and info.name not in off_layers]
        if not names and not off_layers:
            names = [info.name for info in infos]  # biases alone
        reasons = {name: reason for reason, layers in self.count.not_judged.items() for name in layers}
        if not self.folded:
            singles = names
        elif len(names) + len(off_layers) <= MAX_UNFOLDED_LAYERS or len(names) <= MAX_HEALTHY_ROWS:
            untrained = self._untrained()
            singles = [name for name in names if name not in untrained]
        else:
            candidates = [name for name in names if name not in reasons] or names
            singles = sorted(candidates, key=self._closeness)[:MAX_HEALTHY_ROWS]
        rows = [self._other(name, reasons) for name in singles]
        for reason in (None, *self.count.not_judged):
            group = [name for name in names if reasons.get(name) == reason and name not in singles]
            if len(group) == 1:
                rows.append(self._other(group[0], reasons))
            elif group and reason is None:
                rows.append(self._fold(group, HEALTHY, HEALTHY))
            elif group:
                remark = ": ".join(filter(None, (reason, names_in(self.measurement, group))))
                rows.append(self._fold(group, NOT_JUDGED, NOT_JUDGED, remark if self.count.judged else ""))
        return rows

    def _untrained(self) -> set[str]:
        """Return many layers without an update for one reason, such as those of a teacher, while others are judged."""
        groups = self.count.not_judged.values() if self.count.judged else ()
        return {
            name
            for layers in groups
            if len(layers) > MAX_ROWS_OF_CAUSE and all(math.isnan(self.ratios[self.indices[layer]]) for layer in layers)
            for name in layers
        }

    def _nodes(self) -> list[Row]:
        """Return the rows of modules that have features only, which are never judged."""
        names = [info.name for info in self.measurement.layers if info.role == NODE]
        if self.folded and len(names) > MAX_UNFOLDED_LAYERS:
            return [self._fold(names, "nodes", NOT_JUDGED)]
        return [self._row(name, NOT_JUDGED) for name in names]

    def _other(self, name: str, reasons: Mapping[str, str]) -> Row:
        """Return the row of a layer that is healthy or not judged; the reason is given only if others were judged."""
        if name not in reasons:
            return self._row(name, HEALTHY)
        remark = ": ".join(filter(None, (NOT_JUDGED, reasons[name])))
        return self._row(name, NOT_JUDGED, remark=remark if self.count.judged else "")

    def _closeness(self, name: str) -> float:
        """Return a key that sorts layers by their distance from typical, the furthest first."""
        ratio = self.ratios[self.indices[name]]
        if math.isnan(ratio):
            return math.inf
        return -abs(math.log(ratio)) if 0 < ratio < math.inf else -math.inf

    def _row(self, name: str, state: str, verdict: Verdict | None = None, remark: str = "") -> Row:
        return Row((self.indices[name],), self.label(name), state, verdict, remark)

    def _fold(self, names: Sequence[str], label: str, state: str, remark: str = "") -> Row:
        return Row(tuple(self.indices[name] for name in names), f"+{len(names)} {label}", state, remark=remark)

    def label(self, name: str) -> str:
        """Return the name of a layer in the table: its full name if nothing is folded."""
        return self.bare.get(name, name) if self.folded else name
