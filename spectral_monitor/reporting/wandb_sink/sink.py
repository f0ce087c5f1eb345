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
from spectral_monitor.messages import some
from spectral_monitor.reporting.content.essentials import OVERLAID, PREFIX, Log, checked_log, essentials
from spectral_monitor.reporting.content.headline import announcement, headline
from spectral_monitor.reporting.content.history import History, is_drawn
from spectral_monitor.reporting.content.tally import is_judged, named_by, off, tally
from spectral_monitor.reporting.html.report import whole_page
from spectral_monitor.reporting.wandb_sink.charts import CHARTS, PICTURES, VERDICTS, charts, pictures, verdict_table

AXIS = "trainer/global_step"
"""What everything is drawn over; Lightning's name for it."""
PAGE = "spectral/page"
SHOWN = frozenset(
    {*(f"{PREFIX}_{key}" for key in OVERLAID), f"{PREFIX}/summary/violations", f"{PREFIX}/summary/loss_change"}
)
"""Numbers that have a panel of their own: the same in every network."""
WORST = frozenset(f"{PREFIX}/summary/{key}" for key in ("violations", "worst_layer_ratio"))
"""Numbers of which the run's summary has the largest too."""
MAX_POINTS = 128
"""Of a line, at most: each time a chart is logged its points go into a file of their own."""
MAX_KEYS_ONE_BY_ONE = 4000
"""Keys that W&B is told of one by one. Its process takes some 15 seconds for 3,000, and four times that for twice as
many, in the background, once."""
PROFILE = "spectral-profile"
"""Name and type of the artifact."""
SECONDS_BETWEEN_ALERTS = 600.0
"""Seconds from one alert on a layer that begins to be off to the next."""
MAX_ALERTS = 30
"""In a run."""
MAX_NAMES = 10
"""Layers that a text names."""
TITLE = "Spectral monitor: "
"""Of an alert."""


class WandbSink:
    """Logs measurements to a W&B run, each with one call of ``run.log``, over ``trainer/global_step``.

    It is given the essential numbers, named as in :class:`~spectral_monitor.reporting.TensorBoardSink`. W&B would make
    a panel for each: only some ten have one, those of ``all`` layers, which have the same names in every network, so
    that runs lie over each other. The others are hidden, can be added to any panel by hand, and are left out of the
    run's summary. A chart for each question on a logarithmic scale, pictures of layer by step and a table of the root
    verdicts are renewed together. The run's summary has the answer in a sentence, the layers that are off, and how many
    root verdicts there are and were at most.
    When a root verdict begins, W&B sends an alert; layers that follow from it are counted there and send none. It sends
    another when layers are healthy again. In the end the page of ``spectral-monitor report`` is logged, if plotly is
    installed. The run's profile is saved as an artifact, ``"spectral-profile"``, for
    ``SpectralCondition(reference=...)`` in another run.

    Args:
        run: what ``wandb.init`` returned.
        settings: of the monitor; they go into the run's config, under ``"spectral_monitor"``.
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
        self._run, self._settings, self._every = run, dict(settings or {}), heatmap_every
        self._log_what, self._asked, self._offset = checked_log(log), tuple(asked), offset
        self._history = History(MAX_POINTS)
        self._seen: set[str] = set()  # keys
        self._defined: set[str] = set()  # names and patterns that W&B was told of
        self._alerts = _Alerts(run)
        self._count = 0
        self._latest: Measurement | None = None
        self._drawn: Measurement | None = None
        self._tabled: Measurement | None = None

    def write(self, measurement: Measurement) -> None:
        """Write all numbers and charts in one call; then the run's summary, and alerts."""
        if not self._seen:
            self._begin()
        self._latest = measurement
        self._history.add(measurement)
        self._count += 1
        row: dict[str, Any] = dict(essentials(measurement, self._log_what, self._asked))
        try:
            if is_drawn(self._count, self._every):
                self._add_table(row, measurement)
                self._add_charts(row, measurement)
        finally:
            self._log(row, measurement)  # the numbers, even if there are no charts
        self._summarize(measurement)
        self._alerts.tell(measurement)

    def close(self) -> None:
        """Write what has changed since the last charts, and the page, in one more call; then the profile."""
        latest, self._latest = self._latest, None
        if latest is None:
            return
        import wandb

        row: dict[str, Any] = {}
        try:
            if latest.roots != (() if self._tabled is None else self._tabled.roots):
                self._add_table(row, latest)
            if self._every and self._drawn is not latest:
                self._add_charts(row, latest)
            if (text := whole_page(self._history)) is not None:
                row[PAGE] = wandb.Html(text, inject=False)  # it has a style of its own
        finally:
            if row:
                self._log(row, latest)
        self._save_profile()

    def _begin(self) -> None:
        if self._settings:
            self._run.config.update({"spectral_monitor": self._settings}, allow_val_change=True)
        self._run.define_metric(AXIS)
        self._seen.add(AXIS)

    def _log(self, row: Mapping[str, Any], measurement: Measurement) -> None:
        for key in row:
            if key not in self._seen:
                self._define(key)
        self._run.log({**row, AXIS: measurement.step + self._offset})

    def _define(self, key: str) -> None:
        """Tell W&B what to do with a key, by its full name, in which dots must be escaped: else they are levels.

        There are patterns too, such as ``spectral/lr/*``, but of two that match W&B does not say which it takes, and
        Lightning has defined ``*``. They are for more keys than can be told one by one.
        """
        self._seen.add(key)
        name = key.replace(".", "\\.")
        how: dict[str, Any] = {"hidden": True, "summary": "none"}
        if key.startswith(f"{CHARTS}/"):  # no metric, but its points are, and W&B looks for them in the summary
            name, how = f"{name}_table", {"hidden": True}
        elif key in SHOWN or key in WORST:
            how = {"hidden": key not in SHOWN, **({"summary": "last,max"} if key in WORST else {})}
        elif key in (VERDICTS, PAGE) or key.startswith(f"{PICTURES}/"):
            how = {}
        elif len(self._defined) >= MAX_KEYS_ONE_BY_ONE:
            of = key.split("/")
            name = "/".join([*of[: 2 if of[0] == PREFIX else 1], "*"])  # the quantity's
        if name not in self._defined:
            self._run.define_metric(name, step_metric=AXIS, **how)
            self._defined.add(name)

    def _add_table(self, row: dict[str, Any], measurement: Measurement) -> None:
        row[VERDICTS] = verdict_table(measurement)
        self._tabled = measurement

    def _add_charts(self, row: dict[str, Any], measurement: Measurement) -> None:
        self._drawn = measurement
        row.update(charts(self._history, self._asked))
        row.update(pictures(self._history))

    def _summarize(self, measurement: Measurement) -> None:
        summary: dict[str, Any] = {"spectral/violating_layers": some(off(measurement), MAX_NAMES) or "none"}
        if is_judged(measurement):  # else what was said last still holds
            summary["spectral/headline"] = headline(measurement)
        self._run.summary.update(summary)

    def _save_profile(self) -> None:
        import wandb

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "profile.json"
            try:
                save_profile(self._history.of("update_natural").measurements, path)
            except ValueError:  # not enough was measured
                return
            artifact = wandb.Artifact(PROFILE, type=PROFILE)
            artifact.add_file(str(path))
            self._run.log_artifact(artifact)


class _Alerts:
    """Tells of root verdicts that begin, and of what is healthy again; not too often."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self._left = MAX_ALERTS
        self._told: dict[str, float] = {}  # layer, or verdict on the network -> when
        self._open: set[str] = set()  # of those told of

    def tell(self, measurement: Measurement) -> None:
        """Send one alert for each root verdict that begins, and one for all that is healthy again.

        A root that has any layer of one that was told of is the same one.
        """
        now, count = monotonic(), tally(measurement)
        roots = [(root, _subjects(root)) for root in measurement.roots]
        still = {*count.disturbed, *(layer for layers in count.not_judged.values() for layer in layers)}
        still |= {subject for _, subjects in roots for subject in subjects}
        ended = sorted(self._open - still) if count.judged else []
        self._open -= set(ended)
        for root, subjects in roots:
            if self._open.isdisjoint(subjects):
                last = max((self._told.get(subject, -math.inf) for subject in subjects), default=-math.inf)
                if now - last < SECONDS_BETWEEN_ALERTS:
                    continue
                self._told |= dict.fromkeys(subjects, now)
                self._begins(root, measurement)
            self._open |= set(subjects)
        if ended:
            self._send(
                "INFO", ended, "healthy again", f"step {measurement.step}: {some(ended, MAX_NAMES)} healthy again"
            )

    def _begins(self, root: Verdict, measurement: Measurement) -> None:
        text = announcement(root, measurement)
        if root.layer != NETWORK and root.seen:
            text += f"\n{root.seen}"
        names = named_by(root)
        self._send("WARN", names or [root.cause.replace("_", " ")], "off" if names else "", text)

    def _send(self, level: str, names: Sequence[str], what: str, text: str) -> None:
        if self._left == 0:
            return
        self._left -= 1
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        end = f"{more} {what}".rstrip()
        room = 63 - len(f"{TITLE}{end}")  # W&B wants fewer than 64
        name = names[0] if len(names[0]) <= room else f"…{names[0][1 - room :]}"
        last = "" if self._left else "\n(No more alerts will be sent in this run.)"
        self._run.alert(
            title=f"{TITLE}{name}{end}", text=f"{text}{last}", level=level, wait_duration=SECONDS_BETWEEN_ALERTS
        )


def _subjects(root: Verdict) -> tuple[str, ...]:
    """Return what a root is on: its layers, or for a verdict on the network its cause."""
    return named_by(root) or (f"the network ({root.cause.replace('_', ' ')})",)
