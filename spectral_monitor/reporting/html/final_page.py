"""The page about a run, for loggers that take one, from the measurements that a sink has kept."""

from __future__ import annotations

from spectral_monitor.reporting.content.history import History


def whole_page(history: History) -> str | None:
    """Return the page about a run; ``None`` without plotly, or where nothing was measured."""
    try:
        import plotly  # type: ignore[import-untyped]  # noqa: F401
    except ImportError:
        return None
    from spectral_monitor.reporting.html.report import report

    measurements = history.every()
    return report(measurements) if measurements else None
