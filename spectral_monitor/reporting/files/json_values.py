"""Numbers and layers as JSON has them, and files of lines that may have been cut short."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO

from spectral_monitor.measurement import LayerInfo


def plain(value: float) -> float | str | None:
    """Return a number in JSON, which has no NaN and no inf.

    Example:
        >>> plain(0.5), plain(math.nan), plain(-math.inf)
        (0.5, None, '-inf')
    """
    if math.isnan(value):
        return None
    return str(value) if math.isinf(value) else value


def value_of(value: float | str | None) -> float:
    """Return the number that :func:`plain` was given."""
    return math.nan if value is None else float(value)


def layers_from(rows: Iterable[Mapping[str, Any]]) -> tuple[LayerInfo, ...]:
    """Layers that were written by ``dataclasses.asdict``."""
    return tuple(LayerInfo(**{**row, "shape": tuple(row["shape"])}) for row in rows)


def is_torn(file: BinaryIO) -> bool:
    """Return whether the last line has no end, as when a process was killed while it wrote it."""
    if file.seek(0, os.SEEK_END) == 0:
        return False
    file.seek(-1, os.SEEK_END)
    return file.read() != b"\n"
