"""Weights & Biases: the essential numbers in one call, charts, verdicts, alerts, the page and the run's profile."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from spectral_monitor.condition import NETWORK, Verdict, save_profile
from spectral_monitor.measurement import Measurement
from spectral_monitor.messages import joined
from spectral_monitor.reporting.content.essentials import OVERLAID, PREFIX, Log, checked_log, essentials
from spectral_monitor.reporting.content.headline import announcement, headline
from spectral_monitor.reporting.content.history import History, is_drawn
from spectral_monitor.reporting.content.tally import is_judged, named_by, off, tally
from spectral_monitor.reporting.html.report import whole_page
from spectral_monitor.reporting.wandb_sink.charts import CHARTS, PICTURES, VERDICTS, charts, pictures, verdict_table

AXIS = "trainer/global_step"
"""Key of the x axis of all charts, as Lightning names it."""
PAGE = "spectral/page"
PANEL_KEYS = frozenset(
    {*(f"{PREFIX}_{key}" for key in OVERLAID), f"{PREFIX}/summary/violations", f"{PREFIX}/summary/loss_change"}
)
"""Keys with a panel: the same in every network."""
KEYS_WITH_MAXIMUM = frozenset(f"{PREFIX}/summary/{key}" for key in ("violations", "worst_layer_ratio"))
"""Keys whose largest value is in the run's summary too."""
MAX_POINTS = 128
"""The most points of a line: whenever a chart is logged, its points go into a file."""
MAX_KEYS_ONE_BY_ONE = 4000
"""The most keys that are defined one by one. For 3,000 W&B's process takes some 15 seconds, for twice as many four
times as long, once and in the background."""
PROFILE = "spectral-profile"
"""Name and type of the artifact."""
SECONDS_BETWEEN_ALERTS = 600.0
"""Seconds between two alerts on the same layer, at least."""
MAX_ALERTS = 30
"""The most alerts in a run."""
MAX_NAMES = 10
"""The most layers that a text names."""
TITLE = "Spectral monitor: "
"""Beginning of an alert's title."""
MAX_TITLE_LENGTH = 63
"""W&B's limit for the title of an alert."""


class WandbSink:
    """Logs measurements to a W&B run, each with one call of ``run.log``, over ``trainer/global_step``.

    It logs the essential numbers, named as in :class:`~spectral_monitor.reporting.TensorBoardSink`. W&B would make a
    panel for each. Only some ten have one: those of ``all`` layers, whose names are the same in every network, so that
    runs can be compared. The others are hidden and left out of the run's summary; they can be added to any panel by
    hand. A chart for each question on a logarithmic scale, pictures of layer by step and a table of the root verdicts
    are updated together. The run's summary has the answer in a sentence, the layers that are off, and the current and
    largest number of root verdicts.

    W&B sends an alert when a root verdict begins; it counts the layers that follow, which have no alerts of their own.
    It sends another when layers are healthy again. At the end the page of ``spectral-monitor report`` is logged, if
    plotly is installed. The run's profile is saved as an artifact, ``"spectral-profile"``, for
    ``SpectralCondition(reference=...)`` in another run.

    Args:
        run: the result of ``wandb.init``.
        settings: of the monitor; they are saved in the run's config, under ``"spectral_monitor"``.
        heatmap_every: charts, pictures and the table after measurements 3 and 10, every n-th and the last; 0 for none.
        log, asked, offset: as in :class:`~spectral_monitor.reporting.TensorBoardSink`.

    Example:
        >>> # sink = WandbSink(wandb.init(project="mine"))
        >>> # probe = SpectralProbe(model, optimizer, sinks=[sink])
    """

    def __init__(
        self,
        run: Any,
        settings: Mapping[str, Any] | None = None,
        heatmap_every: int = 20,
        *,
        log: Log = "essential",
        asked: Sequence[str] = (),
        offset: int = 0,
    ) -> None:
        self._run, self._settings, self._heatmap_every = run, dict(settings or {}), heatmap_every
        self._log_setting, self._requested, self._offset = checked_log(log), tuple(asked), offset
        self._history = History(MAX_POINTS)
        self._logged: set[str] = set()  # keys
        self._defined: set[str] = set()  # names and patterns that W&B has definitions of
        self._alerts = _Alerts(run)
        self._count = 0
        self._latest: Measurement | None = None
        self._last_charted: Measurement | None = None
        self._last_tabled: Measurement | None = None

    def write(self, measurement: Measurement) -> None:
        """Write all numbers and charts in one call; then the run's summary, and alerts."""
        if not self._logged:
            self._begin()
        self._latest = measurement
        self._history.add(measurement)
        self._count += 1
        row: dict[str, Any] = dict(essentials(measurement, self._log_setting, self._requested))
        try:
            if is_drawn(self._count, self._heatmap_every):
                self._add_table(row, measurement)
                self._add_charts(row, measurement)
        finally:
            self._log(row, measurement)  # the numbers, even if the charts fail
        self._summarize(measurement)
        self._alerts.send_changes(measurement)

    def close(self) -> None:
        """Write the table and charts if they have changed, and the page, in one more call; then the profile."""
        latest, self._latest = self._latest, None
        if latest is None:
            return
        import wandb

        row: dict[str, Any] = {}
        try:
            if latest.roots != (() if self._last_tabled is None else self._last_tabled.roots):
                self._add_table(row, latest)
            if self._heatmap_every and self._last_charted is not latest:
                self._add_charts(row, latest)
            if (text := whole_page(self._history)) is not None:
                row[PAGE] = wandb.Html(text, inject=False)  # the page has its own style
        finally:
            if row:
                self._log(row, latest)
        self._save_profile()

    def _begin(self) -> None:
        if self._settings:
            self._run.config.update({"spectral_monitor": self._settings}, allow_val_change=True)
        self._run.define_metric(AXIS)
        self._logged.add(AXIS)

    def _log(self, row: Mapping[str, Any], measurement: Measurement) -> None:
        for key in row:
            if key not in self._logged:
                self._define(key)
        self._run.log({**row, AXIS: measurement.step + self._offset})

    def _define(self, key: str) -> None:
        """Define a key for W&B: whether it is hidden, and which of its values are in the summary.

        Keys are defined by full name, with dots escaped because W&B takes them for levels. Patterns, such as
        ``spectral/lr/*``, are for keys beyond :data:`MAX_KEYS_ONE_BY_ONE` only: if two patterns match, W&B does not
        document which it takes, and Lightning has defined ``*``.
        """
        self._logged.add(key)
        name = key.replace(".", "\\.")
        options: dict[str, Any] = {"hidden": True, "summary": "none"}
        if key.startswith(f"{CHARTS}/"):  # the chart is no metric, but its points are; W&B reads them from the summary
            name, options = f"{name}_table", {"hidden": True}
        elif key in PANEL_KEYS or key in KEYS_WITH_MAXIMUM:
            options = {"hidden": key not in PANEL_KEYS, **({"summary": "last,max"} if key in KEYS_WITH_MAXIMUM else {})}
        elif key in (VERDICTS, PAGE) or key.startswith(f"{PICTURES}/"):
            options = {}
        elif len(self._defined) >= MAX_KEYS_ONE_BY_ONE:
            parts = key.split("/")
            name = "/".join([*parts[: 2 if parts[0] == PREFIX else 1], "*"])  # all keys of the quantity
        if name not in self._defined:
            self._run.define_metric(name, step_metric=AXIS, **options)
            self._defined.add(name)

    def _add_table(self, row: dict[str, Any], measurement: Measurement) -> None:
        row[VERDICTS] = verdict_table(measurement)
        self._last_tabled = measurement

    def _add_charts(self, row: dict[str, Any], measurement: Measurement) -> None:
        self._last_charted = measurement
        row.update(charts(self._history, self._requested))
        row.update(pictures(self._history))

    def _summarize(self, measurement: Measurement) -> None:
        summary: dict[str, Any] = {"spectral/violating_layers": joined(off(measurement), MAX_NAMES) or "none"}
        if is_judged(measurement):  # else the last headline still holds
            summary["spectral/headline"] = headline(measurement)
        self._run.summary.update(summary)

    def _save_profile(self) -> None:
        import wandb

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "profile.json"
            try:
                save_profile(self._history.of("update_natural").measurements, path)
            except ValueError:  # there are too few measurements
                return
            artifact = wandb.Artifact(PROFILE, type=PROFILE)
            artifact.add_file(str(path))
            self._run.log_artifact(artifact)


class _Alerts:
    """Sends alerts when root verdicts begin and when layers are healthy again; not too often."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self._remaining = MAX_ALERTS
        self._sent_at: dict[str, float] = {}  # subject of a root -> time of its last alert
        self._open: set[str] = set()  # subjects with an alert that are not healthy again

    def send_changes(self, measurement: Measurement) -> None:
        """Send one alert for each root verdict that begins, and one for all subjects that are healthy again.

        A root with a subject that has an open alert has not just begun.
        """
        now, count = monotonic(), tally(measurement)
        roots = [(root, _subjects(root)) for root in measurement.roots]
        unhealthy = {*count.disturbed, *(layer for layers in count.not_judged.values() for layer in layers)}
        unhealthy |= {subject for _, subjects in roots for subject in subjects}
        ended = sorted(self._open - unhealthy) if count.judged else []
        self._open -= set(ended)
        for root, subjects in roots:
            if self._open.isdisjoint(subjects):
                latest = max(self._sent_at.get(subject, -math.inf) for subject in subjects)
                if now - latest < SECONDS_BETWEEN_ALERTS:
                    continue
                self._sent_at |= dict.fromkeys(subjects, now)
                self._send_root(root, measurement)
            self._open |= set(subjects)
        if ended:
            text = f"step {measurement.step}: {joined(ended, MAX_NAMES)} healthy again"
            self._send("INFO", ended, "healthy again", text)

    def _send_root(self, root: Verdict, measurement: Measurement) -> None:
        text = announcement(root, measurement)
        if root.layer != NETWORK and root.seen:
            text += f"\n{root.seen}"
        names = named_by(root)
        self._send("WARN", names or [root.cause.replace("_", " ")], "off" if names else "", text)

    def _send(self, level: str, names: Sequence[str], state: str, text: str) -> None:
        if self._remaining == 0:
            return
        self._remaining -= 1
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        ending = f"{others} {state}".rstrip()
        length = MAX_TITLE_LENGTH - len(f"{TITLE}{ending}")
        name = names[0] if len(names[0]) <= length else f"…{names[0][1 - length :]}"
        if not self._remaining:
            text += "\n(No more alerts will be sent in this run.)"
        self._run.alert(title=f"{TITLE}{name}{ending}", text=text, level=level, wait_duration=SECONDS_BETWEEN_ALERTS)


def _subjects(root: Verdict) -> tuple[str, ...]:
    """Return the layers of a root, or for a verdict on the network its cause."""
    return named_by(root) or (f"the network ({root.cause.replace('_', ' ')})",)
