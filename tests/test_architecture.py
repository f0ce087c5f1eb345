"""The house rules: language, the front door, folders that can be read at a glance, one place for the version."""

from __future__ import annotations

import doctest
import importlib.util
from pathlib import Path

import pytest

import spectral_monitor

ROOT = Path(__file__).parents[1]
MOST_FILES = 12


def style():
    spec = importlib.util.spec_from_file_location("check_style", ROOT / "docs" / "check_style.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check_style = style()


def test_the_examples_of_the_checker_run():
    assert doctest.testmod(check_style).failed == 0


def test_a_break_of_each_rule_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(check_style, "ROOT", tmp_path)
    module, page = tmp_path / "module.py", tmp_path / "page.md"
    module.write_text('"""How it works."""\n\n\ndef norm():\n    """The norm."""  # computed anew\n')
    page.write_text(f"It is the very same. {'word ' * 30}end.\n\n```\nanew\n```\n")
    found = [line.partition(": ")[2] for line in (*check_style.check_source(module), *check_style.check_page(page))]
    assert found == [
        "a docstring begins with 'How'",
        "the docstring of a function begins with 'The'; begin with a verb, such as 'Return'",
        "'anew': write 'again'",
        "'the very': write 'the'",
        "a sentence of 31 words: word word word word word word ...",
    ]
    assert check_style.check_architecture("`callbacks`", ["callbacks", "new"]) == [
        "ARCHITECTURE.md: no word on the package 'new'"
    ]


@pytest.mark.parametrize("package", ["", *check_style.packages()])
def test_a_folder_can_be_read_at_a_glance(package):
    folder = ROOT / "spectral_monitor" / package.replace(".", "/")
    assert len(list(folder.glob("*.py"))) <= MOST_FILES


def test_the_version_has_one_place():
    assert f"version: {spectral_monitor.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert 'attr = "spectral_monitor.__version__"' in (ROOT / "pyproject.toml").read_text()
