"""The judge: evidence adds up over measurements until it makes a verdict, which ends when the deviation does."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain
from typing import Any

from spectral_monitor.condition.causes import NO_CAUSE, Explanation, cause
from spectral_monitor.condition.findings import Finding, findings
from spectral_monitor.condition.network import Network
from spectral_monitor.condition.optimizers.hyperparameters import Hyperparameters
from spectral_monitor.condition.references import width_transfer
from spectral_monitor.condition.references.width_transfer import WidthComparison
from spectral_monitor.condition.root_causes import Case, verdicts
from spectral_monitor.condition.row import columns
from spectral_monitor.condition.settings import NAMED_BY, SpectralCondition
from spectral_monitor.condition.states import JudgedMeasurement, layer_states
from spectral_monitor.condition.trends.attention import AttentionTrend
from spectral_monitor.condition.trends.decay import DecayTrend
from spectral_monitor.condition.trends.readout import ReadoutTrend
from spectral_monitor.condition.trends.schedule import ScheduleTrend
from spectral_monitor.condition.trends.zero_start import ZeroStartGate
from spectral_monitor.condition.verdict import NETWORK, Remedy, Verdict
from spectral_monitor.condition.whole_network import WholeNetwork
from spectral_monitor.measurement import NOT_FINITE, NOT_STEPPED, LayerState, Measurement

VERSION = 5
"""Version of the saved state."""
REPEAT_FACTOR = 2
"""A root that has ended and comes back is announced again at this many times the step at which it last began."""
OF_NO_SIZE = frozenset({"rate", "vector_rate", "dead", "left_out", "logits_exploding", "attention_collapsed"})
"""Checks that do not look at the size of an update."""


@dataclass
class _Record:
    """One check of one layer over time."""

    quantity: str  # the quantity it looks at; measurements without it do not count
    since: int  # step at which it was first outside its band
    evidence: float = 0.0  # sum of the evidence for a verdict
    outside: int = 0  # number of measurements outside the band since then
    flagged: bool = False  # whether the evidence makes a verdict
    missing: int = 0  # number of consecutive measurements without a value


class Judge:
    """Judges one measurement after the other.

    Measurements may have different quantities: a verdict stands until its quantity is measured again, and causes are
    chosen by the latest value of each quantity.

    Args:
        condition: the limits of layers and of the network.
        tied: layer -> the layer that already counts the same parameters.

    Attributes:
        began: roots that are new at the latest measurement.
        ended: layers that are healthy again.
        findings: findings of the latest measurement.
        states: state of each matrix at the latest measurement.

    Example:
        >>> import torch
        >>> from spectral_monitor import LayerInfo, Measurement
        >>> layers = tuple(LayerInfo(str(i), "operator", 64, 64, (64, 64)) for i in range(4))
        >>> judge = Judge(SpectralCondition())
        >>> for step in (1, 2, 4):
        ...     values = {"update_natural": torch.tensor([0.1, 0.1, 10.0, 0.1]), "lr": torch.tensor([1.0, 1, 100, 1])}
        ...     verdicts = judge.judge(Measurement(step, layers, values, {}))
        >>> [(verdict.layer, verdict.cause) for verdict in verdicts]
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
        self._whole_network = WholeNetwork()
        self._trends: dict[str, AttentionTrend | ReadoutTrend | DecayTrend | ScheduleTrend] = {
            "attention": AttentionTrend(),
            "readout": ReadoutTrend(),
            "decay": DecayTrend(),
            "schedule": ScheduleTrend(),
        }
        self._records: dict[tuple[str, str], _Record] = {}  # of a layer and a check
        self._columns: dict[str, dict[str, float]] = {}  # quantity -> layer -> latest value
        self._announced: set[tuple[str, str]] = set()  # layer and cause of roots that have begun and not ended
        self._last_began: dict[tuple[str, str], int] = {}  # layer and cause of a root -> step at which it last began
        self._unexplained: set[str] = set()  # layers that stand out at the latest measurement for no known cause
        self._frozen: set[str] = set()  # layers that were frozen at some measurement
        self._waited: dict[str, int] = {}  # layer -> measurements since its optimizer stepped
        self._comparisons: list[WidthComparison] = []  # with a profile of a narrower network
        # As in Network; None before the first measurement.
        self._expected: dict[str, float] | None = None
        self._fresh: bool | None = None
        self._new: frozenset[str] = frozenset()
        self._largest_steps: dict[str, float] = {}
        self._initial_sizes: dict[str, float] = {}

    @property
    def waits(self) -> str:
        """The reason why layers were not compared at the latest measurement; empty if they were."""
        return self._zero_start.reason

    def judge(
        self,
        measurement: Measurement,
        settings: Mapping[str, Hyperparameters] | None = None,
        forgotten: tuple[str, ...] = (),
    ) -> tuple[Verdict, ...]:
        """Return the verdicts at the next measurement, roots first, the worst first.

        Args:
            measurement: the next measurement.
            settings: layer -> its optimizer's settings at that step.
            forgotten: parameters other than matrices that get gradients but that no optimizer holds.

        Raises:
            ValueError: the reference is a profile of another model, or a pattern of ``expected`` matches no layer.
        """
        if self._expected is None:
            self.condition.check(measurement.layers, settings)
            self._expected = self.condition.factors(measurement.layers)
        network = replace(self._read(measurement, settings), forgotten=forgotten)
        all_findings = tuple(self._all_findings(measurement, network))
        measured = _measured(measurement)
        self.findings = tuple(finding for finding in all_findings if finding.quantity in measured)
        counted = {(f.layer, f.check): f for f in all_findings if not self._zero_start.waits(f)}
        self._drop_records(counted, measurement, measured)
        for key, finding in counted.items():
            if finding.quantity in measured:
                self._count(key, finding, measurement.step)
        width_cases = self._too_wide(measurement, settings)
        present = verdicts([*width_cases, *self._cases(counted, network)], network)
        self._announce(present, measurement.step)
        ended = network.top_lr == 0 and network.drift > 0  # layers then keep their last state
        if not (ended and self.states):
            compared = {layer for layer, check in counted if check not in OF_NO_SIZE}
            judged = JudgedMeasurement(
                measurement, network, self.condition, self._zero_start, compared, self._unexplained, self._tied
            )
            self.states = self._keep_states(layer_states(judged, present), network)
        return present

    def _read(self, measurement: Measurement, settings: Mapping[str, Hyperparameters] | None) -> Network:
        """Return the network at a measurement, and remember what later measurements need."""
        self._columns |= columns(measurement)
        network = Network.read(measurement, self._columns, settings, self._tied, self._expected)
        self._zero_start.look(measurement, network)
        if self._fresh is None:
            self._fresh, self._new = network.looks_fresh, network.just_drawn
        for row in network.rows:
            step, largest = row.get("update_ratio") * row.to_peak, self._largest_steps.get(row.name, 0.0)
            self._largest_steps[row.name] = step if step > largest and row.has_gradient else largest
            size = network.initial_gain(row) if row.dense else network.initial_rows(row)
            if size > 0:
                self._initial_sizes.setdefault(row.name, size)
        frozen = {row.name for row in network.rows if row.settings.frozen}
        self._frozen |= frozen
        return replace(
            network,
            from_zero=frozenset(self._zero_start.from_zero),
            late_layers=frozenset(self._zero_start.late_layers),
            fresh=self._fresh,
            new=self._new,
            thawed=frozenset(self._frozen - frozen),
            largest_steps=dict(self._largest_steps),
            initial_sizes=self._initial_sizes,
        )

    def _all_findings(self, measurement: Measurement, network: Network) -> Iterator[Finding]:
        """Yield the findings of all checks that are not ignored."""
        of_layers, of_network = findings(network, self.condition), self._whole_network.findings(measurement, network)
        of_trends = (trend.findings(measurement, network) for trend in self._trends.values())
        for finding in chain(of_layers, of_network, *of_trends):
            if NAMED_BY.get(finding.check, finding.check) not in self.condition.ignore:
                yield finding

    def _count(self, key: tuple[str, str], finding: Finding, step: int) -> None:
        """Add the evidence of a finding to the record of its check."""
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

    def _drop_records(
        self, counted: Mapping[tuple[str, str], Finding], measurement: Measurement, measured: Set[str]
    ) -> None:
        """Drop records that have had no value for long, such as those of a layer that was frozen on purpose.

        Measurements whose updates are NaN do not count.
        """
        if self.waits:
            return
        names = {NETWORK, *(info.name for info in measurement.layers)}
        self._records = {key: record for key, record in self._records.items() if key[0] in names}
        for key in self._records.keys() - counted.keys():
            record = self._records[key]
            if record.quantity in measured:
                reason = "" if key[0] == NETWORK else measurement.why("update_natural", key[0])
                record.missing += reason != NOT_FINITE
            if record.missing >= self.condition.persistence:
                del self._records[key]

    def _cases(self, counted: Mapping[tuple[str, str], Finding], network: Network) -> Iterator[Case]:
        """Yield the explained cases of flagged checks, and remember the layers of the others."""
        self._unexplained.clear()
        for key, record in self._records.items():
            if record.flagged and key in counted:
                explanation = cause(counted[key], network, self._whole_network.history)
                if explanation.code == NO_CAUSE and not self.condition.is_own:
                    self._unexplained.add(key[0])
                else:
                    yield Case(counted[key], explanation, record.since, record.outside)

    def _too_wide(self, measurement: Measurement, settings: Mapping[str, Hyperparameters] | None) -> Iterator[Case]:
        """Yield the case that comparisons with a narrower network make together, if the profile is of one.

        Under optimizers like Adam the theory's advice lowers the loss. Under SGD a wide network often trains well at
        the same rate, so the case has no remedy.
        """
        profile = self.condition.profile
        if profile is not None and "width" not in self.condition.ignore:
            comparison = width_transfer.compare_widths(profile, measurement, settings)
            if comparison is not None:
                self._comparisons = [*self._comparisons, comparison][-width_transfer.WINDOW :]
        wide = width_transfer.find_width(self._comparisons)
        if wide is not None:
            finding = Finding("width", NETWORK, "update_natural", wide.ratio, 1.0, (0.0, width_transfer.THRESHOLD))
            remedy = Remedy("scale_lr", (), 1 / wide.divisor) if wide.family == "adam" else None
            since = self._comparisons[-wide.measurements].step
            yield Case(finding, Explanation("width", wide.sentence, remedy), since, wide.measurements)

    def _announce(self, present: tuple[Verdict, ...], step: int) -> None:
        """Find the roots that begin, and the layers that are healthy again.

        A root is no news if its cause was announced for one of its layers, or any cause for all of them. One that comes
        and goes is announced again when training has become twice as long.
        A layer has not ended while it follows from another root or has no value. Nor has a cause of the network that
        gives way to another one, as steps that are too large do to divergence and back.
        """
        off = {name for verdict in present for name in (verdict.layer, *verdict.layers)}
        without_value = {layer for (layer, _), record in self._records.items() if record.flagged} - off
        lasting = without_value | off - {NETWORK}
        layers = {layer for layer, _ in self._announced if layer != NETWORK}
        roots: set[tuple[str, str]] = set()
        began = []
        for verdict in (verdict for verdict in present if verdict.is_root):
            keys = {(name, verdict.cause) for name in (verdict.layer, *verdict.layers)}
            if not (self._announced & keys or (verdict.layers and layers >= set(verdict.layers))):
                if step < REPEAT_FACTOR * max(self._last_began.get(key, 0) for key in keys):
                    continue
                began.append(verdict)
                self._last_began |= dict.fromkeys(keys, step)
            roots |= keys
        self.began = tuple(began)
        self.ended = tuple(sorted(layers - lasting))
        lasting |= {NETWORK} & off
        self._announced = roots | {(layer, code) for layer, code in self._announced if layer in lasting}

    def _keep_states(self, states: dict[str, LayerState], network: Network) -> dict[str, LayerState]:
        """Replace the state of layers whose optimizer did not step by their last one.

        Optimizers that take turns step within as many measurements as there are optimizers; after that, states change.
        """
        turns = len({row.settings.owner for row in network.rows} - {-1})  # no optimizer
        for name, state in states.items():
            waits = state.reason == NOT_STEPPED and name in self.states and self._waited.get(name, 0) < turns
            self._waited[name] = self._waited.get(name, 0) + 1 if waits else 0
            if waits:
                states[name] = self.states[name]
        return states

    def state_dict(self) -> dict[str, Any]:
        """Return the state in plain types, from which another judge can go on."""
        return {
            "version": VERSION,
            "records": [[layer, check, asdict(record)] for (layer, check), record in self._records.items()],
            "known": {key: dict(column) for key, column in self._columns.items()},
            "fresh": self._fresh,
            "new": sorted(self._new),
            **({"frozen": sorted(self._frozen)} if self._frozen else {}),
            "steps": dict(self._largest_steps),
            "began": dict(self._initial_sizes),
            "widths": [asdict(compared) for compared in self._comparisons],
            "told": sorted(map(list, self._announced)),
            **(
                {"last_told": sorted([*key, step] for key, step in self._last_began.items())}
                if self._last_began
                else {}
            ),
            "startup": self._zero_start.state_dict(),
            "whole": self._whole_network.state_dict(),
            **{name: trend.state_dict() for name, trend in self._trends.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned.

        Raises:
            ValueError: the state is of another version.
        """
        if state.get("version") != VERSION:
            raise ValueError(f"the judge's state has version {state.get('version')!r}, this one reads {VERSION}")
        self._records = {(layer, check): _Record(**record) for layer, check, record in state["records"]}
        self._columns = {key: dict(column) for key, column in state["known"].items()}
        self._fresh, self._new = state["fresh"], frozenset(state.get("new", ()))
        self._frozen = set(state.get("frozen", ()))
        self._largest_steps, self._initial_sizes = dict(state["steps"]), dict(state["began"])
        names = [field.name for field in fields(WidthComparison)]  # older states have more
        self._comparisons = [WidthComparison(**{name: saved[name] for name in names}) for saved in state["widths"]]
        self._announced = {(layer, code) for layer, code in state["told"]}
        self._last_began = {(layer, code): int(step) for layer, code, step in state.get("last_told", ())}
        self._zero_start.load_state_dict(state["startup"])
        self._whole_network.load_state_dict(state["whole"])
        for name, trend in self._trends.items():
            trend.load_state_dict(state.get(name, {}))


def _measured(measurement: Measurement) -> frozenset[str]:
    """Return the keys of measured quantities, and of summary values that are not NaN."""
    return frozenset({*measurement.values, *(key for key, x in measurement.summary.items() if not math.isnan(x))})
