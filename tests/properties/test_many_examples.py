"""The same properties on many examples."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", sorted(path.name for path in HERE.glob("test_*.py") if path != Path(__file__)))
def test_on_many_examples(path):
    command = [sys.executable, "-m", "pytest", "-n", "0", "--hypothesis-profile=many", str(HERE / path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
