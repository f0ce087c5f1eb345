"""A trial of a few steps before a long job: the measured layers, faults and costs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from spectral_monitor.condition import SpectralCondition
from spectral_monitor.condition.verdict import Verdict
from spectral_monitor.engine.features.kernels import NO_LOSS
from spectral_monitor.engine.overhead_budget import MAX_OVERHEAD
from spectral_monitor.engine.results.reasons import NOT_QUERIES
from spectral_monitor.measurement import Measurement
from spectral_monitor.messages import SpectralMonitorWarning
from spectral_monitor.monitoring.probe import SpectralProbe
from spectral_monitor.monitoring.trial_copy import HOW, TrialCopy
from spectral_monitor.quantities import TIERS
from spectral_monitor.sharding import refuse_several
from spectral_monitor.state.rng import RandomState

if TYPE_CHECKING:
    from spectral_monitor.reporting.text.lines import Table

STEPS = 3
"""Steps of each copy: the first allocates memory, and evidence adds up over all of them."""
TIER = "standard"
"""The tier that verdicts are based on."""
EVERY = 100
"""The monitor's interval after the first steps."""


@dataclass(frozen=True)
class TierCost:
    """The cost of a tier on this machine."""

    tier: str  # ``"light"``, ``"standard"`` or ``"full"``
    seconds: float  # extra time of a measured step
    steps: float  # the same in plain steps

    @property
    def share(self) -> float:
        """The share of training time if every hundredth step is measured."""
        return self.steps / EVERY

    @property
    def interval(self) -> int:
        """Steps between measurements that cost 1 % of training time."""
        return max(1, math.ceil(self.steps / MAX_OVERHEAD))


class Check:
    """The result of :func:`check`; it prints as a page of text.

    Attributes:
        verdicts: present faults, roots first.
        roles: every measured layer with its role; ``roles.unmeasured`` says which parameters are not measured and why.
        missing: quantity -> why it is NaN in every matrix, where that may be a fault.
        measurement: measurement of the last step of the copy.
        costs: cost of each tier.
        step_seconds: time of a plain training step.
        notes: further remarks, in sentences.
    """

    def __init__(
        self,
        probe: SpectralProbe,
        full: SpectralProbe,
        costs: Sequence[TierCost],
        step_seconds: float,
        notes: Sequence[str],
    ) -> None:
        self.roles, self.measurement = probe.roles(), probe.measurements[-1]
        self.verdicts: tuple[Verdict, ...] = self.measurement.verdicts
        self.missing = _missing(full.measurements[-1])
        self.costs, self.step_seconds, self.notes = tuple(costs), step_seconds, tuple(notes)

    def assert_healthy(self) -> None:
        """Raise if anything is off already.

        Raises:
            AssertionError: with the layers, causes and what to do.
        """
        if self.verdicts:
            raise AssertionError("\n  ".join([self._answer(), *map(str, self.measurement.roots)]))

    def _answer(self) -> str:
        from spectral_monitor.reporting.content.headline import headline

        return headline(self.measurement)

    def _tables(self) -> Iterator[Table]:
        from spectral_monitor.reporting.content.headline import each_of, names_in
        from spectral_monitor.reporting.content.tally import named_by, tally
        from spectral_monitor.reporting.text.lines import Column, Table, reason_lines

        state = tally(self.measurement).state
        lines = []
        for root in self.measurement.roots:
            names = named_by(root)
            layers = f"{each_of(names)}{names_in(self.measurement, names)}: " if names else ""
            lines.append(f"  {layers}{root.sentence}")
        title = f"spectral monitor, {STEPS} steps of a copy: {self._answer()}"
        yield Table(title, (), tuple(lines), state=state)
        roles = self.roles.table()
        missing = reason_lines("quantities that are not measured", [*self.missing.items()], ", ".join)
        yield Table(roles.title, roles.columns, (*roles.foot, *missing))
        columns = (
            Column("tier", tuple(cost.tier for cost in self.costs), text=True),
            Column("ms", tuple(_digits(1e3 * cost.seconds) for cost in self.costs)),
            Column("plain steps", tuple(_digits(cost.steps) for cost in self.costs)),
            Column(f"every {EVERY}th step", tuple(f"{_digits(100 * cost.share)} %" for cost in self.costs)),
            Column("1 % is every", tuple(f"{cost.interval} steps" for cost in self.costs)),
        )
        title = f"a plain step takes {_digits(1e3 * self.step_seconds)} ms here; measuring a step adds:"
        yield Table(title, columns, self.notes)

    def __repr__(self) -> str:
        from spectral_monitor.reporting.text.table import WIDTH

        return "\n\n".join(table.plain(WIDTH) for table in self._tables())

    def _repr_html_(self) -> str:
        from spectral_monitor.reporting.text.notebook import html_table

        return "".join(map(html_table, self._tables()))


def check(
    model: nn.Module,
    batch: Any,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
    *,
    condition: SpectralCondition = SpectralCondition(),
    roles: Mapping[str, str] | None = None,
) -> Check:
    """Train a copy for a few steps on one batch, and return what a monitor would report: ten seconds before ten days.

    The model, its optimizer, the batch and all random generators stay bit for bit as they are. The copy takes the
    memory of the model and its optimizer's state once more.

    Args:
        model: the module that is to be trained. A ``LightningModule`` needs neither an optimizer nor a loss.
        batch: one batch: ``(inputs, ..., targets)`` with a loss. Without a loss it is the argument of
            ``training_step``, or of a model that returns its loss: a mapping for keywords, a tuple for arguments.
        optimizer: its optimizer, or several. Learning rates that a schedule has lowered are set to their peak in the
            copy.
        loss: ``loss(outputs, targets)``, such as ``torch.nn.functional.cross_entropy``.
        condition: the limits that layers are judged by.
        roles: pattern -> role, where a guess is wrong.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: the model cannot be copied or measured, or no loss is found.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> batch = torch.randn(16, 4), torch.randint(2, (16,))
        >>> result = check(model, batch, optimizer, nn.functional.cross_entropy)
        >>> result.roles["2"], [cost.tier for cost in result.costs]
        ('readout', ['light', 'standard', 'full'])
    """
    _refuse(model, batch, loss)
    with RandomState.now().replayed(), _notes_of_warnings() as notes:
        trial = TrialCopy(model, batch, optimizer, loss)
        notes += trial.notes
        plain = min([trial.timed() for _ in range(STEPS)][1:])
        probes = {}
        for tier in TIERS:
            trial = TrialCopy(model, batch, optimizer, loss)
            probes[tier] = _probed(trial, tier, condition, roles)
    costs = []
    for tier, probe in probes.items():
        seconds = min(m.summary["overhead_ms"] / 1e3 for m in list(probe.measurements)[1:])
        costs.append(TierCost(tier, seconds, seconds / plain))
    result = Check(probes[TIER], probes["full"], costs, plain, list(dict.fromkeys(notes)))
    if loss is not None:  # under a Trainer the training step returns it
        result.missing = {key: reason for key, reason in result.missing.items() if reason != NO_LOSS}
    return result


def _probed(
    trial: TrialCopy, tier: str, condition: SpectralCondition, roles: Mapping[str, str] | None
) -> SpectralProbe:
    """Return a probe that has measured every step of a copy.

    Raises:
        ValueError: a step was not measured.
    """
    probe = SpectralProbe(
        trial.root,
        trial.optimizers,
        every_n_steps=1,
        quantities=tier,
        roles=roles,
        condition=condition,
        mode="observe",
        drift_every=1,
    )
    for _ in range(STEPS):
        with probe.step():
            probe.report_loss(trial.step())
    if len(probe.measurements) < STEPS:
        raise ValueError("the optimizer did not step: nothing was measured")
    return probe


def _refuse(model: Any, batch: Any, loss: Any) -> None:
    """Raise an error for arguments of a wrong kind, and on several processes."""
    refuse_several("check")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if getattr(model, "automatic_optimization", True) is False and loss is None:
        raise ValueError("check cannot run a training step with manual optimization: pass it an optimizer and a loss")
    if isinstance(batch, Iterator | DataLoader):
        raise TypeError(f"batch must be one batch, got {type(batch).__name__}: pass next(iter(loader))")
    if loss is None:
        return
    if not callable(loss):
        raise TypeError(f"loss must be a function of outputs and targets, got {loss!r}")
    if not isinstance(batch, tuple | list) or len(batch) < 2:
        raise TypeError(f"with a loss, batch must be (inputs, ..., targets), got {type(batch).__name__}: {HOW}")


@contextmanager
def _notes_of_warnings() -> Iterator[list[str]]:
    """Collect the monitor's warnings in a list; issue other warnings again afterwards."""
    notes: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield notes
    for item in caught:
        if issubclass(item.category, SpectralMonitorWarning):
            notes.append(str(item.message))
        elif "self.log" not in str(item.message):  # which has no trainer here
            warnings.warn_explicit(item.message, item.category, item.filename, item.lineno)


def _missing(measurement: Measurement) -> dict[str, str]:
    """Return quantity -> why no matrix has a number of it; quantities of attention are left out in networks without."""
    matrices = [i for i, info in enumerate(measurement.layers) if info.is_matrix]
    missing: dict[str, str] = {}
    for key, column in measurement.values.items():
        if matrices and not bool((~column[matrices].isnan()).any()):
            reasons = (measurement.why(key, measurement.layers[i].name) or "the reason is not known" for i in matrices)
            reason = next((reason for reason in reasons if reason != NOT_QUERIES), "")
            missing |= {key: reason} if reason else {}
    return missing


def _digits(value: float) -> str:
    """Return a number with at least two digits, all of them if it is large.

    Example:
        >>> _digits(0.0512), _digits(4.26), _digits(1820.4)
        ('0.051', '4.3', '1820')
    """
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"
