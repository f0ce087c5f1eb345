"""The tutorial notebook runs, and shows what it says it shows."""

from __future__ import annotations

from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
NOTEBOOK = Path(__file__).parents[2] / "examples" / "tutorial.ipynb"


@pytest.mark.slow
def test_the_tutorial_runs_and_names_the_fault():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    printed = ["".join(output.get("text", "") for output in cell.outputs) for cell in code]
    verdicts = next(text for text in printed if "lr_too_large" in text)
    assert verdicts.splitlines()[0] == "4"
    assert "is 0.1, that of the other layers 0.001: use 0.001" in verdicts
    before, after = (text.splitlines()[0] for text in printed if "healthy" in text)
    assert before.endswith("1 of 4 layers off: 4; 3 healthy")
    assert after.endswith("all 4 layers healthy")
