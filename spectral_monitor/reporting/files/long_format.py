"""Measurements in long format: one row for each number, for pandas, CSV and parquet."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spectral_monitor.measurement import Measurement

COLUMNS = ("step", "layer", "role", "quantity", "value")


def long_rows(measurements: Iterable[Measurement]) -> Iterator[tuple[int, str, str, str, float]]:
    """Yield a row of :data:`COLUMNS` for every number that is not NaN.

    Example:
        >>> import torch
        >>> from spectral_monitor import LayerInfo, Measurement
        >>> layers = (LayerInfo("head", "readout", 10, 64, (10, 64)), LayerInfo("b", "vector", 10, 1, (10,)))
        >>> list(long_rows([Measurement(5, layers, {"alignment": torch.tensor([0.5, math.nan])}, {})]))
        [(5, 'head', 'readout', 'alignment', 0.5)]
    """
    for measurement in measurements:
        for quantity, column in measurement.values.items():
            for info, value in zip(measurement.layers, column.tolist(), strict=True):
                if not math.isnan(value):
                    yield measurement.step, info.name, info.role, quantity, value


def frame(rows: Iterable[tuple[int, str, str, str, float]]) -> Any:
    """Return rows as a ``pandas.DataFrame``; without rows it still has its columns.

    Raises:
        ImportError: pandas is not installed.
    """
    try:
        import pandas as pd  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise ImportError("to_pandas needs pandas: pip install pandas; without it, to_rows() has plain dicts") from None
    return pd.DataFrame(list(rows), columns=list(COLUMNS))
