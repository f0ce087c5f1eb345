"""Files beside checkpoints: what they are called, where they may be, reading and writing them.

A checkpoint may come from anybody. So what it says of its files is checked before any of them is looked for. Nothing is
ever written to a place that a checkpoint names.
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
"""Hexadecimal SHA-256; empty where a process could not tell."""


def side_file_name(of: str) -> str:
    """Return what the file of tensors with this fingerprint is called."""
    return f"spectral-monitor-{of[:16]}.pt"


def described(fingerprints: Sequence[str], folder: Path) -> dict[str, Any]:
    """Return what a checkpoint holds of the files of all processes, in plain types."""
    names = [side_file_name(one) for one in fingerprints]
    return {"names": names, "row_hashes": list(fingerprints), "folder": str(folder)}


def checked(description: Any) -> tuple[list[str], Path]:
    """Return the fingerprints of the files that a checkpoint describes, and the folder they were written to.

    Raises:
        ValueError: it is not what :func:`described` returns: a fingerprint is none, or the folder is not an absolute
            path on this machine.
    """
    entries = description if isinstance(description, dict) else {}
    prints, folder = entries.get("row_hashes"), entries.get("folder")
    if not isinstance(prints, list) or not prints:
        raise ValueError(f"the checkpoint names no file of the monitor: {description!r:.80}")
    for one in prints:
        checked_fingerprint(one)
    if not isinstance(folder, str) or not _is_local(folder):
        raise ValueError(f"the checkpoint's folder {folder!r:.80} is no absolute path on this machine")
    return prints, Path(folder)


def checked_fingerprint(one: Any) -> str:
    """Return a fingerprint that a checkpoint names.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(one, str) or not _FINGERPRINT.fullmatch(one):
        raise ValueError(f"the checkpoint's fingerprint {one!r:.80} is no hexadecimal SHA-256")
    return one


def _is_local(folder: str) -> bool:
    """Return whether a path is absolute and of this machine: no address, and no share of another one."""
    return Path(folder).is_absolute() and "://" not in folder and not folder.startswith(("//", "\\\\"))


def read(fingerprint_then: str, folders: Sequence[Path]) -> tuple[dict[str, Any] | None, str]:
    """Return the tensors of a file in one of the folders; else why not."""
    name, wrong = side_file_name(fingerprint_then), []
    for path in (folder / name for folder in folders):
        if path.is_file():
            try:
                tensors = torch.load(path, map_location="cpu", weights_only=True)
            except Exception as error:
                wrong.append(f"{path} cannot be read ({type(error).__name__})")
                continue
            if fingerprint(tensors) == fingerprint_then:
                return tensors, ""
            wrong.append(f"{path} is not the file that was written")
    return None, "; ".join(wrong) or f"{name} is missing in {' and in '.join(map(str, folders))}"


def write(tensors: dict[str, Any], path: Path) -> None:
    """Write all of the file or nothing of it.

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
