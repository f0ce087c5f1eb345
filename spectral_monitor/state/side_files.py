"""Side files, which hold tensors beside a checkpoint: their names, their folders, reading and writing them.

A checkpoint may come from anybody, so its description of side files is checked before any of them is opened. Nothing is
ever written to a folder that a checkpoint names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from spectral_monitor.state.serialize import fingerprint

_FINGERPRINT = re.compile(r"([0-9a-f]{64})?")
"""Hexadecimal SHA-256; empty if a process could not compute it."""


def side_file_name(file_fingerprint: str) -> str:
    """Return the name of the file whose tensors have this fingerprint."""
    return f"spectral-monitor-{file_fingerprint[:16]}.pt"


def described(fingerprints: Sequence[str], folder: Path) -> dict[str, Any]:
    """Return a checkpoint's description of the files of all processes, in plain types."""
    names = list(map(side_file_name, fingerprints))
    return {"names": names, "row_hashes": list(fingerprints), "folder": str(folder)}


def checked(description: Any) -> tuple[list[str], Path]:
    """Return the fingerprints of the files that a checkpoint describes, and the folder they were written to.

    Raises:
        ValueError: it is not what :func:`described` returns: a fingerprint is invalid, or the folder is not an
            absolute path on this machine.
    """
    entries = description if isinstance(description, dict) else {}
    fingerprints, folder = entries.get("row_hashes"), entries.get("folder")
    if not isinstance(fingerprints, list) or not fingerprints:
        raise ValueError(f"the checkpoint names no file of the monitor: {description!r:.80}")
    for value in fingerprints:
        checked_fingerprint(value)
    if not isinstance(folder, str) or not _is_local(folder):
        raise ValueError(f"the checkpoint's folder {folder!r:.80} is not an absolute path on this machine")
    return fingerprints, Path(folder)


def checked_fingerprint(value: Any) -> str:
    """Return a fingerprint that a checkpoint names.

    Raises:
        ValueError: it is no fingerprint.
    """
    if not isinstance(value, str) or not _FINGERPRINT.fullmatch(value):
        raise ValueError(f"the checkpoint's fingerprint {value!r:.80} is not a hexadecimal SHA-256")
    return value


def _is_local(folder: str) -> bool:
    """Return whether a path is absolute and on this machine: neither a URL nor a network share."""
    return Path(folder).is_absolute() and "://" not in folder and not folder.startswith(("//", "\\\\"))


def read(file_fingerprint: str, folders: Sequence[Path]) -> tuple[dict[str, Any] | None, str]:
    """Return the tensors of the file with this fingerprint, from the first folder that has it; else the reason."""
    name, problems = side_file_name(file_fingerprint), []
    for path in (folder / name for folder in folders):
        if path.is_file():
            try:
                tensors = torch.load(path, map_location="cpu", weights_only=True)
            except Exception as error:
                problems.append(f"{path} cannot be read ({type(error).__name__})")
                continue
            if fingerprint(tensors) == file_fingerprint:
                return tensors, ""
            problems.append(f"{path} is not the file that was written")
    return None, "; ".join(problems) or f"{name} is missing in {' and in '.join(map(str, folders))}"


def write(tensors: dict[str, Any], path: Path) -> None:
    """Write the file completely or not at all.

    Raises:
        OSError: it could not be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        torch.save(tensors, unfinished)
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
