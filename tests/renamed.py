"""Run tests again for ``pytorch_lightning``: the same files, with its name in the place of ``lightning.pytorch``.

    python tests/renamed.py tests/callbacks tests/resume -m "not slow"

They run in a copy, where ``lightning`` cannot be imported: a program of the other package needs nothing of it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PARTS = ("benchmarks", "callbacks", "docs", "examples", "spectral_monitor", "tests")
RENAMED = ("benchmarks", "docs", "examples", "tests")
NAMES = (
    (r"\blightning\.pytorch\b", "pytorch_lightning"),
    (r"\blightning\.fabric\b", "lightning_fabric"),
    (r"\bimport lightning as\b", "import pytorch_lightning as"),
)
ABOUT_BOTH = ("test_packages.py", "test_renamed.py", "test_installed.py", "renamed.py")
"""Tests that know both packages by their names."""
REFUSED = 'import sys\n\nsys.modules["lightning"] = None\n'


def renamed(text: str) -> str:
    """Return source text in which every import of ``lightning`` is one of ``pytorch_lightning``."""
    for pattern, name in NAMES:
        text = re.sub(pattern, name, text)
    return text


def copy(target: Path) -> None:
    """Write the repository's files to a folder, renamed."""
    for part in PARTS:
        ignored = shutil.ignore_patterns("__pycache__", *ABOUT_BOTH)
        shutil.copytree(ROOT / part, target / part, symlinks=True, ignore=ignored)
    for file in (path for path in ROOT.iterdir() if path.is_file()):
        shutil.copy(file, target)
    for path in (path for part in RENAMED for path in (target / part).rglob("*") if path.suffix in (".py", ".yaml")):
        path.write_text(renamed(path.read_text(encoding="utf-8")), encoding="utf-8")
    (target / "sitecustomize.py").write_text(REFUSED)


def run(*arguments: str, **kwargs: object) -> subprocess.CompletedProcess[str]:
    """Run pytest with these arguments in a renamed copy."""
    with tempfile.TemporaryDirectory() as folder:
        copy(Path(folder))
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
        return subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": folder}, check=False, **kwargs)


if __name__ == "__main__":
    sys.exit(run(*sys.argv[1:]).returncode)
