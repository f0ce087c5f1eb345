"""The versions that are claimed are those that are tried, and the page says what came of each."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def loaded():
    spec = importlib.util.spec_from_file_location("versions", ROOT / "tests" / "versions.py")
    module = sys.modules["versions"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


versions = loaded()


def test_what_is_run_is_there():
    assert not [name for name in versions.TESTS if not (ROOT / "tests" / name).exists()]


def test_the_floors_of_the_package_are_a_corner():
    text = (ROOT / "pyproject.toml").read_text()
    (floors,) = (corner for corner in versions.CORNERS if corner.name == "floors")
    for name in ("torch", "lightning", "torchmetrics", "tensorboard"):
        (floor,) = re.findall(rf'^    "{name}>=([\d.]+)",$', text, re.MULTILINE)
        assert (getattr(floors, name) + ".").startswith(floor + "."), name
    assert f'requires-python = ">={floors.python}"' in text


def test_the_versions_of_the_constraints_are_a_corner():
    text = (ROOT / "constraints.txt").read_text()
    (corner,) = (corner for corner in versions.CORNERS if corner.name == "constraints")
    for name in ("torch", "lightning", "torchmetrics", "tensorboard", "numpy"):
        assert re.search(rf"^{name}=={re.escape(getattr(corner, name))}(;|$)", text, re.MULTILINE), name


def test_the_workflow_takes_the_same_list(capsys):
    assert versions.main(["--matrix"]) == 0
    listed = json.loads(capsys.readouterr().out)["include"]
    assert [one["name"] for one in listed] == [corner.name for corner in versions.CORNERS]
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    assert "python3 tests/versions.py --matrix" in workflow
    assert 'python tests/versions.py "${{ matrix.name }}"' in workflow


def test_the_page_keeps_what_was_found():
    page = f"before\n{versions.BEGIN}\n{versions.END}\nafter\n"
    assert set(versions.recorded(page).values()) == {"not run so far"}
    found = {**versions.recorded(page), "middle": "7 passed, 2026-01-02"}
    page = versions.written(page, found)
    assert versions.recorded(page) == found
    assert "| middle | 3.12 | 2.8.0 | 2.5.5 | newest | newest | newest | 7 passed, 2026-01-02 |" in page
    assert page.startswith("before\n")
    assert page.endswith("\nafter\n")
    assert versions.written(page, found) == page


def test_a_version_that_cannot_be_had_costs_a_sentence(monkeypatch, tmp_path, capsys):
    page = tmp_path / "support.md"
    page.write_text(f"{versions.BEGIN}{versions.END}")
    monkeypatch.setattr(versions, "PAGE", page)
    monkeypatch.setattr(versions, "PLACE", tmp_path)
    monkeypatch.setattr(versions, "CORNERS", (versions.Corner("old", "2.1", "0.1"),))
    assert versions.main(["old"]) == 0
    assert capsys.readouterr().out == "old: not run: Python 2.1 is not installed here\n"
    assert "not run: Python 2.1 is not installed here" in page.read_text()


def test_a_failure_is_one(monkeypatch, tmp_path):
    page = tmp_path / "support.md"
    page.write_text(f"{versions.BEGIN}{versions.END}")
    monkeypatch.setattr(versions, "PAGE", page)
    monkeypatch.setattr(versions, "PLACE", tmp_path)
    monkeypatch.setattr(versions, "run", lambda corner, any_build: "1 failed, 3 passed, 2026-01-02")
    assert versions.main(["floors"]) == 1


def test_a_corner_that_does_not_exist(capsys):
    with pytest.raises(SystemExit):
        versions.main(["ceiling"])
    assert "no corner ceiling; there are: floors, " in capsys.readouterr().err
