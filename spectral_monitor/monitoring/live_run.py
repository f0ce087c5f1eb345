"""The common base of the callback and the probe."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from spectral_monitor.condition import Verdict, save_profile
from spectral_monitor.condition.optimizers.hyperparameters import Hyperparameters
from spectral_monitor.correction import LRCorrection
from spectral_monitor.engine import Engine, Settings
from spectral_monitor.measurement import History, Measurement
from spectral_monitor.messages import WarnOnce, announce
from spectral_monitor.monitoring.reactions import OnVerdict, Reactions
from spectral_monitor.monitoring.supervisor import Supervisor
from spectral_monitor.reporting.run import MeasuredRun

Say = Callable[[str], None]


class LiveRun(MeasuredRun):
    """A run that is measured while it trains: settings, latest measurements, and reactions to them."""

    correction: LRCorrection | None
    _warn: WarnOnce
    _engine: Engine | None
    _supervisor: Supervisor | None
    _code = ""  # makes the optimizers with the corrected learning rates

    def __init__(self, settings: Settings, on_verdict: OnVerdict | None, stop_on: str | Sequence[str]) -> None:
        self.settings = settings
        self._reactions = Reactions(on_verdict, stop_on)
        self._measurements = History(maxlen=settings.history)
        self._hyperparameters: dict[str, Hyperparameters] = {}

    @property
    def measurements(self) -> History:
        """The latest measurements."""
        return self._measurements

    def save_profile(self, path: str | os.PathLike[str]) -> None:
        """Write the natural norms of this run, for ``SpectralCondition(reference=path)`` on another one.

        Raises:
            ValueError: nothing, or not enough, was measured.
        """
        save_profile(self.measurements, path, self._hyperparameters)

    def param_groups_code(self) -> str:
        """Return Python code that makes the optimizers with corrected learning rates, at the peak of the schedule.

        In ``configure_optimizers`` it replaces the callback.

        Raises:
            RuntimeError: nothing is corrected, or nothing has been trained yet.
        """
        if self.correction is None:
            raise RuntimeError('no learning rates are corrected: that takes mode="correct"')
        self._keep_code()
        if not self._code:
            raise RuntimeError("no learning rates are known yet: train with this callback first")
        return self._code

    def _keep_code(self) -> None:
        """Keep the code of the corrected learning rates, after the first measurement: before it they are guesses."""
        if self._supervisor is not None and self._engine is not None and self._engine.measured > 0:
            self._code = self._supervisor.param_groups_code()

    def _take(
        self,
        measurement: Measurement,
        supervisor: Supervisor,
        write: Callable[[Measurement], None],
        tell: Say,
        is_first: bool,
    ) -> Verdict | None:
        """Judge, keep and log a measurement and correct learning rates; return the verdict to stop training for.

        ``write`` logs the measurement, ``tell`` receives a line on each notable correction, and ``is_first`` says
        whether this process warns for all.
        """
        measurement = supervisor.judge(measurement, announce if is_first else lambda text: None)
        self._hyperparameters = supervisor.settings
        self._measurements.append(measurement)
        write(measurement)
        supervisor.correct(measurement, tell)
        return self._reactions(supervisor.began, self._warn, is_first)
