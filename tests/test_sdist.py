"""What is packed as source is all there is: tests, documentation and examples work from it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = [".ci", "benchmarks", "callbacks", "docs", "examples", "spectral_monitor", "tests"]


@pytest.mark.slow
def test_everything_is_in_it(tmp_path):
    pytest.importorskip("setuptools")
    copy, out = tmp_path / "copy", tmp_path / "dist"
    for part in PARTS:
        shutil.copytree(ROOT / part, copy / part)
    for file in (path for path in ROOT.iterdir() if path.is_file() and not path.name.startswith(".")):
        shutil.copy(file, copy)
    build = f"from setuptools.build_meta import build_sdist; build_sdist({str(out)!r})"
    done = subprocess.run([sys.executable, "-c", build], cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (archive,) = out.iterdir()
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert not [name for name in names if "__pycache__" in name]
    there = {str(path.relative_to(copy)) for part in PARTS for path in (copy / part).rglob("*.*") if path.is_file()}
    missing = {name for name in there if not name.endswith(".pyc")} - names
    assert not missing
    needed = {"CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "constraints.txt", "mkdocs.yml"}
    assert needed | {".ci/run"} <= names
