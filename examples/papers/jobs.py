"""Long experiments: one row for each piece of work, kept in a file, so that a stopped script goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def rows_of(path: Path, keys: Iterable[Row], work: Callable[..., Row], title: str) -> list[Row]:
    """A row ``{**key, **work(**key)}`` for each key, in their order.

    Rows that the file of JSON lines has already are read, the others are worked out and appended at once.
    """
    keys = list(keys)
    known = {_name({name: row[name] for name in keys[0]}): row for row in _read(path) if keys[0].keys() <= row.keys()}
    missing = [key for key in keys if _name(key) not in known]
    for key in progress(missing, title, done=len(keys) - len(missing)):
        known[_name(key)] = row = json.loads(json.dumps({**key, **work(**key)}))
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
    return [known[_name(key)] for key in keys]


def progress(some: Iterable[Any], title: str, done: int = 0) -> Iterable[Any]:
    """The same, with a bar on stderr if tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return some
    some = list(some)
    return tqdm(some, desc=title, initial=done, total=done + len(some), disable=not some)


def _read(path: Path) -> list[Row]:
    """Complete lines; a stopped script may have left half of one, which is cut off."""
    if not path.exists():
        return []
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    return [json.loads(line) for line in whole.splitlines()]


def _name(key: Row) -> str:
    return json.dumps(key, sort_keys=True)
