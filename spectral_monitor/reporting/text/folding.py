"""The rows of a table of layers: roots first, what follows from them folded, then the others."""

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
"""The state of a layer that follows from another one; to a measurement such a layer is off."""
MAX_UNFOLDED_LAYERS = 16
"""Layers of a network in which each has a row; of more, most are folded."""
MAX_HEALTHY_ROWS = 5
"""Healthy layers that keep their row, those furthest from typical."""
MAX_ROWS_OF_CAUSE = 3
"""Layers of one cause that each have a row; of several causes one has."""


@dataclass(frozen=True)
class Row:
    """One row of a table of layers."""

    places: tuple[int, ...]  # of its layers in the measurement; several where they are folded
    label: str  # the layer's name, or how many they are
    state: str  # ``"off"``, ``"disturbed"``, ``"healthy"`` or ``"not judged"``
    verdict: Verdict | None = None  # of the layer, if it has one and is not folded
    what: str = ""  # what is to be said of it


def rows(measurement: Measurement, ratios: Sequence[float], folded: bool = True) -> list[Row]:
    """Return the rows of a measurement: every root and below it what follows from it, then all other layers.

    Args:
        ratios: (L,), every layer against its typical value, NaN where that is not known.
        folded: whether what says little by itself shares a row.
    """
    return _Rows(measurement, ratios, folded).all()


class _Rows:
    def __init__(self, measurement: Measurement, ratios: Sequence[float], folded: bool) -> None:
        self.measurement, self.ratios, self.folded = measurement, ratios, folded
        self.count: Tally = tally(measurement)
        self.bare = unprefixed(tuple(info.name for info in measurement.layers))
        self.place = {info.name: i for i, info in enumerate(measurement.layers)}
        self.verdicts: dict[str, Verdict] = {}
        for verdict in measurement.verdicts:
            self.verdicts.setdefault(verdict.layer, verdict)

    def all(self) -> list[Row]:
        """Return every row, in its order."""
        found: list[Row] = []
        left, follow = dict.fromkeys(self.count.off), dict(self.count.disturbed)
        shown = self.measurement.roots[:MAX_ROOTS] if self.folded else self.measurement.roots
        for root in shown:
            names = [name for name in named_by(root) if name == root.layer or name in left]
            found += self._same_cause(root, [name for name in names if name in self.place])
            found += self._following(root.layer, [name for name, of in follow.items() if of == root.layer])
            left = {name: None for name in left if name not in names}
            follow = {name: of for name, of in follow.items() if of != root.layer}
        rest = [name for name in left if name in self.place]
        if self.folded and len(rest) > MAX_ROWS_OF_CAUSE:
            found.append(self._fold(rest, "off", OFF, "other causes"))
        else:
            states = self.measurement.states
            whys = {name: states[name].reason if name in states else "" for name in rest}
            found += [self._row(name, OFF, self.verdicts.get(name), why) for name, why in whys.items()]
        if self.folded and len(self.measurement.roots) > MAX_ROOTS:
            found += self._following("", list(follow))
        else:  # roots that were lifted at this very step
            for gone in dict.fromkeys(follow.values()):
                found += self._following(gone, [name for name, of in follow.items() if of == gone])
        return found + self._others() + self._nodes()

    def _same_cause(self, root: Verdict, names: Sequence[str]) -> list[Row]:
        """Return a row for the root's layer and one for each other layer of its cause, many of those folded."""
        first = [
            self._row(name, OFF, root, root.cause.replace("_", " "))
            if name == root.layer
            else self._row(name, OFF, self.verdicts.get(name), "same cause")
            for name in names
        ]
        most = MAX_ROWS_OF_CAUSE if len(self.measurement.roots) == 1 else 2
        if not self.folded or len(first) <= most:
            return first
        return [*first[: most - 1], self._fold(names[most - 1 :], "off", OFF, "same cause")]

    def _following(self, root: str, names: Sequence[str]) -> list[Row]:
        """Return the rows of layers that follow from a root: one if there are several, unless nothing is folded."""
        names = [name for name in names if name in self.place]
        if self.folded and len(names) > 1:
            return [self._fold(names, "disturbed", DISTURBED, "by the above" if root else "by others")]
        source = "by the network" if root == NETWORK else f"by {self.label(root)}"
        return [self._row(name, DISTURBED, self.verdicts.get(name), f"disturbed {source}") for name in names]

    def _others(self) -> list[Row]:
        """Return the rows of all other layers: in the order of the network, or the furthest and the rest folded."""
        seen = {*self.count.off, *self.count.disturbed}
        infos = self.measurement.layers
        names = [info.name for info in infos if info.is_matrix and info.name not in seen]
        if not names and not seen:
            names = [info.name for info in infos]  # biases alone
        reasons = {name: reason for reason, some in self.count.not_judged.items() for name in some}
        if not self.folded:
            alone = names
        elif len(names) + len(seen) <= MAX_UNFOLDED_LAYERS or len(names) <= MAX_HEALTHY_ROWS:
            still = self._untrained()
            alone = [name for name in names if name not in still]
        else:
            candidates = [name for name in names if name not in reasons] or names
            alone = sorted(candidates, key=self._far)[:MAX_HEALTHY_ROWS]
        found = [self._other(name, reasons) for name in alone]
        for reason in (None, *self.count.not_judged):
            rest = [name for name in names if reasons.get(name) == reason and name not in alone]
            if len(rest) == 1:
                found.append(self._other(rest[0], reasons))
            elif rest and reason is None:
                found.append(self._fold(rest, HEALTHY, HEALTHY))
            elif rest:
                what = ": ".join(filter(None, (reason, names_in(self.measurement, rest))))
                found.append(self._fold(rest, NOT_JUDGED, NOT_JUDGED, what if self.count.judged else ""))
        return found

    def _untrained(self) -> set[str]:
        """Return the layers without an update that are many for one reason, such as those of a teacher, while others
        are judged.
        """
        many = [some for some in self.count.not_judged.values() if self.count.judged and len(some) > MAX_ROWS_OF_CAUSE]
        return {name for some in many if all(math.isnan(self.ratios[self.place[x]]) for x in some) for name in some}

    def _nodes(self) -> list[Row]:
        """Return the rows of modules that have features only, which nothing judges."""
        names = [info.name for info in self.measurement.layers if info.role == NODE]
        if self.folded and len(names) > MAX_UNFOLDED_LAYERS:
            return [self._fold(names, "nodes", NOT_JUDGED)]
        return [self._row(name, NOT_JUDGED) for name in names]

    def _other(self, name: str, reasons: Mapping[str, str]) -> Row:
        """Return the row of a layer that is healthy or not judged; why not is said only if others were."""
        if name not in reasons:
            return self._row(name, HEALTHY)
        what = ": ".join(filter(None, (NOT_JUDGED, reasons[name])))
        return self._row(name, NOT_JUDGED, what=what if self.count.judged else "")

    def _far(self, name: str) -> float:
        """Return a key that sorts layers by their distance from typical, the furthest first."""
        ratio = self.ratios[self.place[name]]
        if math.isnan(ratio):
            return math.inf
        return -abs(math.log(ratio)) if 0 < ratio < math.inf else -math.inf

    def _row(self, name: str, state: str, verdict: Verdict | None = None, what: str = "") -> Row:
        return Row((self.place[name],), self.label(name), state, verdict, what)

    def _fold(self, names: Sequence[str], label: str, state: str, what: str = "") -> Row:
        return Row(tuple(self.place[name] for name in names), f"+{len(names)} {label}", state, what=what)

    def label(self, name: str) -> str:
        """Return what a layer is called: in full where nothing is folded."""
        return self.bare.get(name, name) if self.folded else name
