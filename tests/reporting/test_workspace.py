"""The template of a W&B workspace: a section for each question, numbers that every network has."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType

import pytest

from spectral_monitor.reporting import wandb_workspace
from spectral_monitor.reporting.content.essentials import OVERLAID, SUMMARIES
from spectral_monitor.reporting.content.panels import PANELS


@dataclass
class Part:
    """Takes what the package's classes take."""

    name: str = ""
    title: str = ""
    x: str = ""
    y: list = field(default_factory=list)
    log_y: bool | None = None
    panels: list = field(default_factory=list)
    is_open: bool = False
    media_keys: list = field(default_factory=list)


class Workspace:
    made = None

    def __init__(self, **given):
        Workspace.made, self.given, self.url = self, given, ""

    def save(self):
        self.url = "https://wandb.ai/me/mine"


@pytest.fixture
def package(monkeypatch):
    names = (
        "wandb_workspaces",
        "wandb_workspaces.workspaces",
        "wandb_workspaces.reports",
        "wandb_workspaces.reports.v2",
    )
    made = {name: ModuleType(name) for name in names}
    for name, module in made.items():
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(made[parent], last, module)
    made[names[1]].Workspace, made[names[1]].Section = Workspace, Part
    made[names[3]].LinePlot = made[names[3]].MediaBrowser = Part


def test_every_number_that_lies_over_other_runs_is_in_a_section(package):
    assert wandb_workspace("me", "mine") == "https://wandb.ai/me/mine"
    given = Workspace.made.given
    assert (given["entity"], given["project"]) == ("me", "mine")
    sections = given["sections"]
    asked = [panel.question for panel in PANELS if not panel.by_name]
    assert [section.name for section in sections] == asked[:-1], "no corrector"
    assert [section.is_open for section in sections] == [True, *[False] * 5]
    plots = {plot.title: plot for section in sections for plot in section.panels}
    shown = {key for plot in plots.values() for key in plot.y}
    assert {f"spectral_{key}" for key in OVERLAID} <= shown
    assert shown <= {*(f"spectral_{key}" for key in OVERLAID), *(f"spectral/summary/{key}" for key in SUMMARIES)}
    assert plots["update over weight"].log_y
    assert not plots["update size vs. typical, log2"].log_y
    assert not plots["do outputs move downhill, cosine"].log_y, "it may be below 0"
    assert {plot.x for plot in plots.values() if plot.y} == {"trainer/global_step"}


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    with pytest.raises(ImportError, match="pip install wandb-workspaces"):
        wandb_workspace("me", "mine")
