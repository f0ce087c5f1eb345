"""The tests of everything a trainer does, once more for ``pytorch_lightning``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RENAMED = Path(__file__).parents[1] / "renamed.py"
OFTEN = (
    "callbacks/test_monitor.py",
    "callbacks/test_loggers.py",
    "loops/test_lightning.py",
    "correction/test_swap_lightning.py",
)
"""What is used most, where the packages could differ.

``make test-pytorch-lightning`` runs the tests of all that a trainer does, strategies included.
"""


@pytest.mark.slow
@pytest.mark.parametrize("path", OFTEN)
def test_the_same_of_the_other_package(path):
    command = [sys.executable, str(RENAMED), f"tests/{path}", "-m", "not slow"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.slow
def test_lightning_is_out_of_reach_there(tmp_path):
    """Else a test that imports it unseen would show nothing."""
    from tests import renamed

    assert renamed.renamed("from lightning.pytorch.cli import X") == "from pytorch_lightning.cli import X"
    (tmp_path / "sitecustomize.py").write_text(renamed.REFUSED)
    command = [sys.executable, "-c", "import lightning"]
    done = subprocess.run(command, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ModuleNotFoundError: import of lightning halted" in done.stderr
