"""The judge: evidence adds up over measurements, becomes verdicts, and lifts when the deviation is over."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any

from spectral_monitor.condition.causes import NO_CAUSE, Explanation, cause
from spectral_monitor.condition.findings import Finding, findings
from spectral_monitor.condition.network import Network
from spectral_monitor.condition.optimizers.hyperparameters import Hyperparameters
from spectral_monitor.condition.references.width_transfer import (
    THRESHOLD,
    WINDOW,
    WidthComparison,
    compare_widths,
    find_width,
)
from spectral_monitor.condition.root_causes import Case, verdicts
from spectral_monitor.condition.row import columns
from spectral_monitor.condition.settings import SpectralCondition
from spectral_monitor.condition.states import Seen, layer_states
from spectral_monitor.condition.trends.attention import AttentionTrend
from spectral_monitor.condition.trends.decay import DecayTrend
from spectral_monitor.condition.trends.readout import ReadoutTrend
from spectral_monitor.condition.trends.schedule import ScheduleTrend
from spectral_monitor.condition.trends.zero_start import ZeroStartGate
from spectral_monitor.condition.verdict import NETWORK, Remedy, Verdict
from spectral_monitor.condition.whole_network import Whole
from spectral_monitor.measurement import NOT_FINITE, NOT_STEPPED, LayerState, Measurement

VERSION = 5
"""Of the saved state."""
OF_NO_SIZE = frozenset({"rate", "vector_rate", "dead", "left_out", "logits_exploding", "attention_collapsed"})
"""Checks that say little of the size of an update."""
NAMED_BY = {
    "rate": "rates",
    "vector_rate": "rates",
    "reference": "updates",
    "embedding": "embeddings",
    "grown": "exploding",
    "cut_off": "dead",
    "loss_returns": "rates_too_large",
    "sgd_rule": "rates",
    "ntk": "rates",
    "features_vanish": "features",
    "faded": "schedule",
    "warmup": "schedule",
    "eval_mode": "modes",
    "dropout": "modes",
    "loss_input": "loss",
    "features_grow": "rates_too_large",
    "symmetric": "weights",
}
"""Check -> its name in ``SpectralCondition(ignore=[...])``, where that is another one."""


@dataclass
class _Record:
    """One check of one layer over time.

    Attributes:
        quantity: what it is read off; a measurement without that says nothing of it.
        since: step at which it was first seen outside.
        evidence: for a verdict, added up.
        outside: measurements it was seen outside since then.
        flagged: whether that makes a verdict.
        missing: measurements in a row without a value.
    """

    quantity: str
    since: int
    evidence: float = 0.0
    outside: int = 0
    flagged: bool = False
    missing: int = 0


class Judge:
    """Judges one measurement after the other.

    They need not all have the same quantities: a verdict stands until its quantity is measured again, and what it takes
    to tell causes apart is what was measured last.

    Args:
        condition: what layers are held against.
        tied: layer -> the layer that already counts the same parameters.

    Attributes:
        began: roots that were none at the measurement before; warn of these.
        ended: names of layers that are healthy again.
        findings: what was looked at in the latest measurement.
        states: every matrix -> its state at the latest measurement.

    Example:
        >>> import torch
        >>> from spectral_monitor import LayerInfo, Measurement
        >>> layers = tuple(LayerInfo(str(i), "operator", 64, 64, (64, 64)) for i in range(4))
        >>> judge = Judge(SpectralCondition())
        >>> for step in (1, 2, 4):
        ...     values = {"update_natural": torch.tensor([0.1, 0.1, 10.0, 0.1]), "lr": torch.tensor([1.0, 1, 100, 1])}
        ...     found = judge.judge(Measurement(step, layers, values, {}))
        >>> [(verdict.layer, verdict.cause) for verdict in found]
        [('2', 'lr_too_large')]
    """

    def __init__(self, condition: SpectralCondition, tied: Mapping[str, str] | None = None) -> None:
        self.condition = condition
        self.began: tuple[Verdict, ...] = ()
        self.ended: tuple[str, ...] = ()
        self.findings: tuple[Finding, ...] = ()
        self.states: dict[str, LayerState] = {}
        self._tied = dict(tied or {})
        self._zero_start = ZeroStartGate()
        self._whole = Whole()
        self._attention, self._readout, self._decay = AttentionTrend(), ReadoutTrend(), DecayTrend()
        self._schedule = ScheduleTrend()
        self._records: dict[tuple[str, str], _Record] = {}
        self._known: dict[str, dict[str, float]] = {}
        self._told: set[tuple[str, str]] = set()
        self._expected: dict[str, float] | None = None
        self._fresh: bool | None = None
        self._new: frozenset[str] = frozenset()
        self._unexplained: set[str] = set()  # layers that stand out at the latest measurement
        self._frozen: set[str] = set()  # layers that were frozen at some measurement
        self._waited: dict[str, int] = {}  # layer -> measurements since its optimizer stepped
        self._steps: dict[str, float] = {}  # layer -> its largest relative update
        self._initial_sizes: dict[str, float] = {}  # as in Network
        self._comparisons: list[WidthComparison] = []  # with a profile of a narrower network

    @property
    def waits(self) -> str:
        """Reasons why layers were not compared at the latest measurement; empty if they were."""
        return self._zero_start.why

    def judge(
        self, measurement: Measurement, settings: Mapping[str, Hyperparameters] | None = None
    ) -> tuple[Verdict, ...]:
        """Return what is off now, roots first, the worst first.

        Args:
            measurement: the next one.
            settings: layer -> its optimizer's settings at that step.

        Raises:
            ValueError: the reference is a profile of another model, or a pattern of ``expected`` matches no layer.
        """
        if self._expected is None:
            self.condition.check(measurement.layers, settings)
            self._expected = self.condition.factors(measurement.layers)
        self._known |= columns(measurement)
        network = Network.read(measurement, self._known, settings, self._tied, self._expected)
        self._zero_start.look(measurement, network)
        if self._fresh is None:
            self._fresh, self._new = network.looks_fresh, network.just_drawn
        for row in network.rows:
            step, before = row.get("update_ratio") * row.to_peak, self._steps.get(row.info.name, 0.0)
            self._steps[row.info.name] = step if step > before and row.has_gradient else before
            size = network.initial_gain(row) if row.dense else network.initial_rows(row)
            if size > 0:
                self._initial_sizes.setdefault(row.info.name, size)
        frozen = {row.info.name for row in network.rows if row.settings.frozen}
        self._frozen |= frozen
        network = replace(
            network,
            from_zero=frozenset(self._zero_start.from_zero),
            fresh=self._fresh,
            new=self._new,
            thawed=frozenset(self._frozen - frozen),
            largest_steps=dict(self._steps),
            initial_sizes=self._initial_sizes,
        )
        everything = tuple(self._all(measurement, network))
        measured = _measured(measurement)
        self.findings = tuple(f for f in everything if f.quantity in measured)
        found = {(f.layer, f.check): f for f in everything if not self._zero_start.waits(f)}
        self._forget(found, measurement)
        for key, finding in found.items():
            if finding.quantity in measured:
                self._count(key, finding, measurement.step)
        self._compare_widths(measurement, settings)
        result = self._verdicts(found, network)
        self._tell(result)
        ended = network.top_lr == 0 and network.drift > 0  # then layers are left as they were seen last
        if not (ended and self.states):
            looked = {layer for layer, check in found if check not in OF_NO_SIZE}  # which say little of a size
            seen = Seen(measurement, network, self.condition, self._zero_start, looked, self._unexplained, self._tied)
            self.states = self._kept(layer_states(seen, result), network)
        return result

    def _all(self, measurement: Measurement, network: Network) -> Iterator[Finding]:
        """Yield every finding on a layer and on the network that is asked for."""
        found = (findings(network, self.condition), self._whole.findings(measurement, network))
        trends = (self._attention, self._readout, self._decay, self._schedule)
        for finding in chain(*found, *(trend.findings(measurement, network) for trend in trends)):
            if NAMED_BY.get(finding.check, finding.check) not in self.condition.ignore:
                yield finding

    def _count(self, key: tuple[str, str], finding: Finding, step: int) -> None:
        record = self._records.get(key)
        if record is None:
            if finding.inside():
                return
            record = self._records[key] = _Record(finding.quantity, since=step)
        record.quantity, record.missing = finding.quantity, 0
        if finding.inside(self.condition.hysteresis if record.flagged else 1.0):
            record.evidence = 0.0 if record.flagged else record.evidence + finding.evidence
            if record.evidence <= 0:
                del self._records[key]
            return
        if not finding.inside():
            record.outside += 1
            record.evidence += finding.evidence
        record.flagged |= record.evidence >= self.condition.evidence

    def _forget(self, found: Mapping[tuple[str, str], Finding], measurement: Measurement) -> None:
        """Drop what has no values any more, such as a layer that was frozen on purpose; NaN steps do not count."""
        if self.waits:
            return
        names = {NETWORK, *(info.name for info in measurement.layers)}
        self._records = {key: record for key, record in self._records.items() if key[0] in names}
        for key in [key for key in self._records if key not in found]:
            record = self._records[key]
            if record.quantity in _measured(measurement):
                why = "" if key[0] == NETWORK else measurement.why("update_natural", key[0])
                record.missing += why != NOT_FINITE
            if record.missing >= self.condition.persistence:
                del self._records[key]

    def _verdicts(self, found: Mapping[tuple[str, str], Finding], network: Network) -> tuple[Verdict, ...]:
        cases = []
        self._unexplained.clear()
        for key, record in self._records.items():
            if record.flagged and key in found:
                told = cause(found[key], network, self._whole.history)
                if told.code == NO_CAUSE and not self.condition.is_own:
                    self._unexplained.add(key[0])
                else:
                    cases.append(Case(found[key], told, record.since, record.outside))
        return verdicts([*self._width(), *cases], network)

    def _compare_widths(self, measurement: Measurement, settings: Mapping[str, Hyperparameters] | None) -> None:
        """Hold updates against those of a narrower network, if the profile is of one."""
        profile = self.condition.profile
        if profile is not None and "width" not in self.condition.ignore:
            compared = compare_widths(profile, measurement, settings)
            if compared is not None:
                self._comparisons = [*self._comparisons, compared][-WINDOW:]

    def _width(self) -> Iterator[Case]:
        """Yield what the comparisons with a narrower network say together.

        Under optimizers like Adam the advice is theory's and lowers the loss; under SGD a wide network often trains
        well at the same rate, so that dividing it is left to the user.
        """
        found = find_width(self._comparisons)
        if found is not None:
            seen = Finding("width", NETWORK, "update_natural", found.ratio, 1.0, (0.0, THRESHOLD))
            remedy = Remedy("scale_lr", (), 1 / found.divisor) if found.family == "adam" else None
            first = self._comparisons[-found.measurements].step
            yield Case(seen, Explanation("width", found.sentence, remedy), first, found.measurements)

    def _tell(self, result: tuple[Verdict, ...]) -> None:
        """Note which roots are new: a layer, or a cause of the network, that was none before.

        A layer that only follows now, or has no value this time, is not over; nor is a cause of the network that
        gives way to another one, as steps that are too large do to divergence and back.
        """
        roots = [verdict for verdict in result if verdict.is_root]
        now = {(name, verdict.cause) for verdict in roots for name in (verdict.layer, *verdict.layers)}
        off = {name for verdict in result for name in (verdict.layer, *verdict.layers)}
        unseen = {layer for (layer, _), record in self._records.items() if record.flagged} - off
        lasting = unseen | off - {NETWORK}
        layers = {layer for layer, _ in self._told if layer != NETWORK}
        self.began = tuple(
            verdict
            for verdict in roots
            if (verdict.layer, verdict.cause) not in self._told and not layers & set(verdict.layers)
        )
        self.ended = tuple(sorted(layers - lasting))
        lasting |= {NETWORK} & off
        self._told = now | {(layer, code) for layer, code in self._told if layer in lasting}

    def _kept(self, states: Mapping[str, LayerState], network: Network) -> dict[str, LayerState]:
        """Return states of which those of optimizers that take turns are as they were seen last, if that is not long
        ago: so many measurements as there are optimizers.
        """
        turns = len({row.settings.owner for row in network.rows})
        found = dict(states)
        for name, state in states.items():
            waits = state.reason == NOT_STEPPED and name in self.states and self._waited.get(name, 0) < turns
            self._waited[name] = self._waited.get(name, 0) + 1 if waits else 0
            if waits:
                found[name] = self.states[name]
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return plain types; with them another judge goes on where this one is."""
        return {
            "version": VERSION,
            "records": [[layer, check, asdict(record)] for (layer, check), record in self._records.items()],
            "known": {key: dict(column) for key, column in self._known.items()},
            "fresh": self._fresh,
            "new": sorted(self._new),
            **({"frozen": sorted(self._frozen)} if self._frozen else {}),
            "steps": dict(self._steps),
            "began": dict(self._initial_sizes),
            "widths": [asdict(compared) for compared in self._comparisons],
            "told": sorted(map(list, self._told)),
            "startup": self._zero_start.state_dict(),
            "whole": self._whole.state_dict(),
            "attention": self._attention.state_dict(),
            "readout": self._readout.state_dict(),
            "decay": self._decay.state_dict(),
            "schedule": self._schedule.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave.

        Raises:
            ValueError: it is of another version.
        """
        if state.get("version") != VERSION:
            raise ValueError(f"the judge's state has version {state.get('version')!r}, this one reads {VERSION}")
        self._records = {(layer, check): _Record(**record) for layer, check, record in state["records"]}
        self._known = {key: dict(column) for key, column in state["known"].items()}
        self._fresh, self._new = state["fresh"], frozenset(state.get("new", ()))
        self._frozen = set(state.get("frozen", ()))
        self._steps, self._initial_sizes = dict(state["steps"]), dict(state["began"])
        self._comparisons = [WidthComparison(**row) for row in state["widths"]]
        self._told = {(layer, code) for layer, code in state["told"]}
        self._zero_start.load_state_dict(state["startup"])
        self._whole.load_state_dict(state["whole"])
        self._attention.load_state_dict(state.get("attention", {}))
        self._readout.load_state_dict(state.get("readout", {}))
        self._decay.load_state_dict(state.get("decay", {}))
        self._schedule.load_state_dict(state.get("schedule", {}))


def _measured(measurement: Measurement) -> frozenset[str]:
    """Return the quantities of layers that were measured, and the values of the whole network that are known."""
    return frozenset({*measurement.values, *(key for key, x in measurement.summary.items() if not math.isnan(x))})
