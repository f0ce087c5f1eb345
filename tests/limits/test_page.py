"""The Python on the page about infinite width runs, in its order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "infinite_width.md"


@pytest.mark.slow
def test_the_python_on_the_page_runs(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, object] = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(block, PAGE.name, "exec"), names)
    printed = capsys.readouterr().out
    assert "infinite" in printed
    assert re.search(r"at width 512 feature_change of net\.\d is within \d+ % of its limit", printed)
    assert "NTK of 256 examples: loss" in printed
    assert (tmp_path / "runs" / "mine" / "limit" / "limit.jsonl").exists()
