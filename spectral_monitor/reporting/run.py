"""The interface of a run, whether it is live in a monitor or probe, or was logged."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spectral_monitor.reporting.text.roles import Roles
from spectral_monitor.suggestions import did_you_mean

if TYPE_CHECKING:
    from spectral_monitor.condition import Verdict
    from spectral_monitor.measurement import Measurement

_INSTEAD = {
    **dict.fromkeys(
        ("history", "results", "data"), "measurements has the latest ones, to_pandas() all of their numbers"
    ),
    **dict.fromkeys(("df", "to_df"), "to_pandas() makes a DataFrame"),
    "to_dict": "latest.to_rows() has a dict for each layer",
    "to_csv": "to_pandas().to_csv(path), or `spectral-monitor export` for a run that was logged",
    "values": "latest.values has a tensor for each quantity",
    "value": "latest.value(quantity, layer) is one number",
    "layers": "roles() has the layers and their roles",
    "summary": "print(table()), or latest.summary for the numbers of the whole network",
    "show": "print(table()) shows the newest measurement",
    **dict.fromkeys(("violations", "problems", "errors"), "verdicts has what is off"),
    **dict.fromkeys(
        ("ok", "healthy", "is_healthy"),
        "verdicts is empty when all is well, and assert_healthy() raises when it is not",
    ),
    "why": "latest.why(quantity, layer) says why a number is missing",
    "save": "report(path) writes a page, to_pandas() makes a DataFrame",
    "losses": "latest.summary['loss_change'] is what one step changed; log the loss itself with Lightning",
}
"""Name that people try -> sentence on what to use."""


class MeasuredRun:
    """The measurements of a run, as tables, plots, pages and verdicts.

    :class:`~spectral_monitor.SpectralMonitor`, :class:`~spectral_monitor.SpectralProbe` and the result of
    :func:`~spectral_monitor.load` are such runs.
    """

    _notes: Sequence[str] = ()
    """Sentences for the foot of a page."""

    @property
    def measurements(self) -> Sequence[Measurement]:
        """The measurements, steps rising; a monitor and a probe keep the newest ones."""
        raise NotImplementedError

    @property
    def latest(self) -> Measurement | None:
        """The newest measurement; ``None`` before the first."""
        return self.measurements[-1] if self.measurements else None

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """The verdicts of the newest measurement that was judged, roots first; empty if there are none."""
        from spectral_monitor.reporting.content.tally import latest_judged

        judged = latest_judged(self.measurements)
        return () if judged is None else judged.verdicts

    def table(self) -> str:
        """Return the newest measurement as text, with a line on verdicts that no longer hold."""
        from spectral_monitor.reporting.text.table import measurement_table

        if self.latest is None:
            return "nothing measured yet"
        return measurement_table(self.latest, earlier=self.measurements)

    def roles(self) -> Roles:
        """Return every measured layer with its role.

        Raises:
            RuntimeError: nothing was measured yet.
        """
        if self.latest is None:
            raise RuntimeError("no layer is known yet: spectral_monitor.inspect(model) finds them without training")
        return Roles(self.latest.layers)

    def to_pandas(self) -> Any:
        """Return all measurements as a ``pandas.DataFrame`` in long format: step, layer, role, quantity, value.

        Numbers that are NaN have no row.

        Raises:
            ImportError: pandas is not installed.
        """
        from spectral_monitor.reporting.files.long_format import frame, long_rows

        return frame(long_rows(self.measurements))

    def plot(self, quantity: str = "update_natural", layers: str | Sequence[str] | None = None) -> Any:
        """Return a plotly figure of one quantity: a curve for each layer, over the band where it should be.

        Args:
            quantity: a key that was measured.
            layers: one or more fnmatch patterns of matrices; by default all matrices.

        Raises:
            ValueError: the quantity was not measured, a pattern matches no layer, or nothing was measured yet.
            ImportError: plotly is not installed.
        """
        from spectral_monitor.reporting.html.plot import figure

        return figure(tuple(self.measurements), quantity, layers)

    def report(self, path: str | os.PathLike[str] = "report.html") -> Path:
        """Write the page of this run and return its path.

        Args:
            path: of the HTML file; an existing file is replaced.

        Raises:
            ValueError: nothing was measured yet.
            ImportError: plotly is not installed.
            OSError: the file cannot be written.
        """
        from spectral_monitor.reporting.html.report import write_report

        write_report(tuple(self.measurements), path, self._notes)
        return Path(path)

    def assert_healthy(self) -> None:
        """Raise if a layer or the network is off, or if no layer was judged: for tests of a training script.

        Raises:
            AssertionError: with the layers, the causes and what to do.
        """
        from spectral_monitor.reporting.content.headline import headline
        from spectral_monitor.reporting.content.tally import latest_judged, tally

        judged = latest_judged(self.measurements)
        if judged is None:
            reason = "nothing was measured" if self.latest is None else headline(self.latest)
            raise AssertionError(f"nothing is known about this run: {reason}")
        if judged.verdicts or not tally(judged).judged:
            lines = "".join(f"\n  {verdict}" for verdict in judged.roots)
            raise AssertionError(f"step {judged.step}: {headline(judged)}{lines}")

    def __getitem__(self, index: int) -> Measurement:
        """Return one measurement; -1 is the newest.

        Raises:
            IndexError: there are not that many.
            TypeError: the index is not a number, such as the name of a layer.
        """
        if not isinstance(index, int):
            raise TypeError(f"a place is a number, such as -1; the newest numbers of a layer are latest[{index!r}]")
        return self.measurements[index]

    def _repr_html_(self) -> str:
        latest = self.latest
        return f"<p>{self.table()}</p>" if latest is None else latest._repr_html_()

    def __dir__(self) -> list[str]:
        """Return all names but the hooks that a trainer calls, so that completion shows what users need."""
        return sorted(name for name in super().__dir__() if not name.startswith("on_"))

    if not TYPE_CHECKING:  # so that a type checker still reports names that are not there

        def __getattr__(self, name: str) -> Any:
            hint = f"; {_INSTEAD[name]}" if name in _INSTEAD else ""
            if not hint and not name.startswith("_"):
                hint = did_you_mean(name, [valid for valid in dir(type(self)) if not valid.startswith(("_", "on_"))])
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}{hint}")
