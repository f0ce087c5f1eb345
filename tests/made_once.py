"""Make what takes long once, where tests are dealt out to several workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def made_once(
    request: pytest.FixtureRequest, factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]
) -> Path:
    """Return the folder of this name, which ``make(folder)`` filled in the first worker that asked."""
    if not hasattr(request.config, "workerinput"):
        folder = factory.mktemp(name)
        make(folder)
        return folder
    folder = factory.getbasetemp().parent / name  # the workers' own folders are side by side
    with FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            begun = folder.with_suffix(".part")
            begun.mkdir(exist_ok=True)
            make(begun)
            begun.rename(folder)
    return folder
