"""What the first example prints in the end."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(params=["quickstart", "distributed"])
def command(request, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "executable", str(EXAMPLES.parent / ".venv" / "bin" / "python"))
    monkeypatch.setenv("PATH", os.devnull)
    monkeypatch.delitem(sys.modules, request.param, raising=False)
    return __import__(request.param).command


def test_commands_are_short(command, monkeypatch, tmp_path):
    monkeypatch.chdir(EXAMPLES.parent)
    assert Path(command("tensorboard")) == Path(".venv/bin/tensorboard")
    monkeypatch.chdir(EXAMPLES)
    assert Path(command("tensorboard")) == Path("../.venv/bin/tensorboard")
    monkeypatch.chdir(tmp_path)
    assert command("tensorboard") == "tensorboard"


def test_what_the_shell_finds_has_no_path(command, monkeypatch):
    monkeypatch.chdir(EXAMPLES.parent)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert command("tensorboard") == "tensorboard"


@pytest.mark.parametrize(("every", "measured"), [("5", True), ("100", False)])
def test_a_report_is_offered_where_there_is_one(every, measured, monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    import quickstart

    small = ["--epochs", "1", "--width", "16", "--every", every]
    monkeypatch.setattr(sys, "argv", ["quickstart.py", *small])
    quickstart.main()
    out = capsys.readouterr().out
    assert "validation accuracy" in out
    assert bool(re.search(r"^     or  .*spectral-monitor report runs/quickstart/version_0 -o", out, re.M)) == measured
    assert ("See it" in out) == ("nothing was measured" not in out) == measured
