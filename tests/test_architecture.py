"""The house rules: language, the front door, folders that can be read at a glance, one place for the version."""

from __future__ import annotations

import doctest
import importlib.util
import re
from pathlib import Path

import pytest

import spectral_monitor

ROOT = Path(__file__).parents[1]
MOST_FILES = 12


def style():
    spec = importlib.util.spec_from_file_location("check_style", ROOT / "docs" / "scripts" / "check_style.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check_style = style()


def test_the_examples_of_the_checker_run():
    assert doctest.testmod(check_style).failed == 0


def test_a_break_of_each_rule_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(check_style, "ROOT", tmp_path)
    module, page = tmp_path / "module.py", tmp_path / "page.md"
    module.write_text(
        '"""How it works."""\n\n\ndef norm():\n    """The norm."""  # computed anew\n    return "It puts it right."\n'
    )
    page.write_text(f"It is the very same. {'word ' * 30}end.\n\n```\nanew\n```\n")
    found = [line.partition(": ")[2] for line in (*check_style.check_source(module), *check_style.check_page(page))]
    assert found == [
        "a docstring begins with 'How'",
        "the docstring of a function begins with 'The'; begin with a verb, such as 'Return'",
        "'puts it right': write 'corrects it'",
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


def test_folders_that_commands_name_are_there():
    """A folder that was moved would end ``make test-fast`` before its first test."""
    text = (ROOT / "Makefile").read_text()
    fast = re.search(r"^FAST := (.*)$", text, re.MULTILINE)[1].split()
    renamed = re.search(r"patsubst %,tests/%,([^)]*)", text)[1].split()
    assert len(fast) > 5
    assert len(renamed) > 5
    assert not [name for name in [*fast, *renamed] if not (ROOT / "tests" / name).is_dir()]
    assert not [name for name in re.findall(r"\btests/[\w.]+", text) if not (ROOT / name).exists()]
