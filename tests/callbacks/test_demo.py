"""The demo: a healthy run in ten lines, a fault that is named and repaired, and what that has won."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_it_says_what_was_won_and_where_the_page_is(tmp_path):
    command = [sys.executable, str(ROOT / "examples" / "demo.py")]
    environment = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    _, healthy, broken, repaired, end = re.split(r"^-{79}\n", done.stdout, flags=re.MULTILINE)
    assert "all 4 layers healthy" in healthy
    assert len(healthy.splitlines()) - 1 <= 10
    assert "1 of 4 layers off: net.4" in broken
    assert "! net.4: its learning rate is 10, that of the other layers 0.1: use 0.1" in broken
    assert repaired.splitlines()[1] == "all 4 layers healthy"
    fault, after, before = map(int, re.findall(r"(\d+) %", end))
    assert fault + 20 < after
    assert after == before, "with the repair it is the healthy run"
    (page,) = re.findall(r"^The page about the broken run: (.*)$", end, re.MULTILINE)
    assert "its learning rate is 10" in (tmp_path / page).read_text()
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert len(done.stdout.splitlines()) <= 30


def test_it_is_installed_with_what_it_needs_and_no_more():
    text = (ROOT / "Makefile").read_text()
    assert '".[demo]"' in text
    assert re.search(r"^demo: \$\(DEMO\)$", text, re.MULTILINE)
    assert re.search(
        r'^demo = \["plotly>=5.20", "scikit-learn"\]$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
