"""A workspace for Weights & Biases: a section for each question, with the numbers that every network has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from spectral_monitor.quantities import QUANTITIES
from spectral_monitor.reporting.content.essentials import LOG2, OVERLAID, PREFIX, SUMMARIES, log2_of
from spectral_monitor.reporting.content.labels import quantity_title
from spectral_monitor.reporting.content.panels import PANELS, Panel
from spectral_monitor.reporting.content.typical import VS_TYPICAL
from spectral_monitor.reporting.wandb_sink.charts import VERDICTS
from spectral_monitor.reporting.wandb_sink.sink import AXIS, PAGE


def wandb_workspace(entity: str, project: str, name: str = "spectral monitor") -> str:
    """Save a workspace in a project of Weights & Biases, and return its address.

    A section for each question has line plots of the numbers that all runs have, so that different networks can be
    compared. Axes are logarithmic if values are positive. Needs ``pip install wandb-workspaces``.

    Args:
        entity: a user or a team.
        project: of that.
        name: of the workspace.

    Raises:
        ImportError: wandb-workspaces is not installed.
    """
    try:
        import wandb_workspaces.workspaces as workspaces  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise ImportError("a workspace needs wandb-workspaces: pip install wandb-workspaces") from None
    workspace = workspaces.Workspace(entity=entity, project=project, name=name, sections=sections())
    workspace.save()
    return str(workspace.url)


def sections() -> list[Any]:
    """Return the sections of a workspace, the first one open; questions that users must request have none."""
    import wandb_workspaces.workspaces as workspaces

    plots = {panel.question: [*_plots(panel)] for panel in PANELS if not panel.by_name}
    questions = [question for question in plots if plots[question]]
    return [workspaces.Section(name=name, panels=plots[name], is_open=name == questions[0]) for name in questions]


def _plots(panel: Panel) -> Iterator[Any]:
    """Yield a plot for each quantity and each value of the whole network that answers a question."""
    import wandb_workspaces.reports.v2 as reports  # type: ignore[import-not-found,unused-ignore]

    for quantity in panel.quantities:
        for key in (log2_of(quantity), quantity):
            names = [f"{PREFIX}_{name}" for name in OVERLAID if name.startswith(f"{key}/")]
            if names:
                logarithmic = LOG2 not in key and not QUANTITIES[quantity].signed
                title = quantity_title(quantity) + ("" if key == quantity else f" {VS_TYPICAL}, log2")
                yield reports.LinePlot(title=title, x=AXIS, y=names, log_y=logarithmic)
    for key in (key for key in panel.summaries if key in SUMMARIES):
        yield reports.LinePlot(title=key.replace("_", " "), x=AXIS, y=[f"{PREFIX}/summary/{key}"])
    if panel is PANELS[0]:
        yield reports.MediaBrowser(title="verdicts and the page", media_keys=[VERDICTS, PAGE])
