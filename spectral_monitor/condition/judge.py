"""Who is outside the condition, since when: findings that last become verdicts, and lift when they are over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from spectral_monitor.condition.causes import cause
from spectral_monitor.condition.checks import Finding, findings
from spectral_monitor.condition.network import Network, columns
from spectral_monitor.condition.settings import SpectralCondition
from spectral_monitor.condition.startup import StartUp
from spectral_monitor.condition.verdict import Verdict
from spectral_monitor.measurement import Measurement

VERSION = 3
"""Of the saved state."""


@dataclass
class _Record:
    """One check of one layer over time.

    Attributes:
        quantity: what it is read off; a measurement without that says nothing of it.
        since: step at which it was first seen outside.
        outside: measurements it was seen outside since then.
        flagged: whether that makes a verdict.
        missing: measurements in a row without a value.
    """

    quantity: str
    since: int
    outside: int = 0
    flagged: bool = False
    missing: int = 0


class Judge:
    """Judges one measurement after the other.

    They need not all have the same quantities: a verdict stands until its quantity is measured again, and what it takes
    to tell causes apart is what was measured last.

    Args:
        condition: what layers are held against.
        optimizers: class names of the optimizers, base classes included or not; they tell causes apart.
        tied: layer -> the layer that already counts the same parameters. Neither is compared with others.

    Attributes:
        began: verdicts on layers that were in order at the measurement before; warn of these.
        ended: names of layers that are in order again.
        findings: what was looked at in the latest measurement.

    Example:
        >>> import torch
        >>> from spectral_monitor import LayerInfo, Measurement
        >>> layers = tuple(LayerInfo(str(i), "operator", 64, 64, (64, 64)) for i in range(4))
        >>> judge = Judge(SpectralCondition(), ["Adam"])
        >>> for step in (1, 2, 3):
        ...     values = {"update_natural": torch.tensor([0.1, 0.1, 10.0, 0.1]), "lr": torch.tensor([1.0, 1, 100, 1])}
        ...     verdicts = judge.judge(Measurement(step, layers, values, {}))
        >>> [(verdict.layer, verdict.cause) for verdict in verdicts]
        [('2', 'lr_too_large')]
    """

    def __init__(
        self, condition: SpectralCondition, optimizers: Sequence[str] = (), tied: Mapping[str, str] | None = None
    ) -> None:
        self.condition = condition
        self.began: tuple[Verdict, ...] = ()
        self.ended: tuple[str, ...] = ()
        self.findings: tuple[Finding, ...] = ()
        self._optimizers = tuple(optimizers)
        self._tied = dict(tied or {})
        self._startup = StartUp()
        self._records: dict[tuple[str, str], _Record] = {}
        self._known: dict[str, dict[str, float]] = {}
        self._checked = False

    @property
    def waits(self) -> str:
        """Why layers were not compared at the latest measurement; empty if they were."""
        return self._startup.why

    def judge(self, measurement: Measurement) -> tuple[Verdict, ...]:
        """Verdicts on the layers that violate the condition now, the worst first.

        Raises:
            ValueError: the reference is a profile of another model.
        """
        if not self._checked:
            self.condition.check(measurement.layers)
            self._checked = True
        before = {layer for (layer, _), record in self._records.items() if record.flagged}
        self._known |= columns(measurement)
        network = Network.read(measurement, self._known, self._optimizers, self._tied)
        self._startup.look(measurement, network)
        network = replace(network, from_zero=frozenset(self._startup.from_zero))
        everything = tuple(findings(network, self.condition))
        self.findings = tuple(f for f in everything if f.quantity in measurement.values)
        found = {(f.layer, f.check): f for f in everything if not self._startup.waits(f)}
        if not self.waits:
            self._forget(found, measurement)
        for key, finding in found.items():
            if finding.quantity in measurement.values:
                self._count(key, finding, measurement.step)
        flagged = [found[key] for key, record in self._records.items() if record.flagged and key in found]
        verdicts = self._verdicts(flagged, network)
        now = {layer for (layer, _), record in self._records.items() if record.flagged}
        self.began = tuple(verdict for verdict in verdicts if verdict.layer not in before)
        self.ended = tuple(sorted(before - now))
        return verdicts

    def _count(self, key: tuple[str, str], finding: Finding, step: int) -> None:
        record = self._records.get(key)
        if record is None:
            if finding.inside():
                return
            record = self._records[key] = _Record(finding.quantity, since=step)
        record.quantity, record.missing = finding.quantity, 0
        if finding.inside(self.condition.hysteresis if record.flagged else 1.0):
            del self._records[key]
            return
        record.outside += not finding.inside()
        record.flagged |= record.outside >= self.condition.persistence

    def _forget(self, found: Mapping[tuple[str, str], Finding], measurement: Measurement) -> None:
        """Drop what has no values any more, such as a layer that was frozen on purpose; NaN steps do not count."""
        for key in [key for key in self._records if key not in found]:
            record = self._records[key]
            if record.quantity in measurement.values:
                record.missing += "NaN or inf" not in measurement.why("update_natural", key[0])
            if record.missing >= self.condition.persistence:
                del self._records[key]

    def _verdicts(self, flagged: Sequence[Finding], network: Network) -> tuple[Verdict, ...]:
        """One of each layer: what is furthest outside."""
        worst: dict[str, Finding] = {}
        for finding in sorted(flagged, key=lambda finding: -finding.excess):
            worst.setdefault(finding.layer, finding)
        verdicts = []
        for finding in worst.values():
            record = self._records[finding.layer, finding.check]
            low, high = finding.limits
            code, sentence = cause(finding, network)
            verdicts.append(
                Verdict(
                    layer=finding.layer,
                    quantity=finding.quantity,
                    value=finding.value,
                    band=(low, high),
                    ratio=finding.ratio,
                    steps=network.step - record.since,
                    measurements=record.outside,
                    cause=code,
                    sentence=sentence,
                )
            )
        return tuple(verdicts)

    def state_dict(self) -> dict[str, Any]:
        """Plain types; with it another judge goes on where this one is."""
        records = [[layer, check, asdict(record)] for (layer, check), record in self._records.items()]
        known = {key: dict(column) for key, column in self._known.items()}
        return {"version": VERSION, "records": records, "known": known, "startup": self._startup.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave.

        Raises:
            ValueError: it is of another version.
        """
        if state.get("version") != VERSION:
            raise ValueError(f"the judge's state has version {state.get('version')!r}, this one reads {VERSION}")
        self._records = {(layer, check): _Record(**record) for layer, check, record in state["records"]}
        self._known = {key: dict(column) for key, column in state["known"].items()}
        self._startup.load_state_dict(state["startup"])
