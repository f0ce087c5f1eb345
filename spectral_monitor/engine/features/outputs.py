"""Outliers among features, the size of a classifier's outputs, underflow in 8-bit formats, and gradient noise."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from spectral_monitor.capture.records.calls import joined
from spectral_monitor.capture.replay.feature_change import Outputs
from spectral_monitor.engine.features.stage import Calls, RowStage, gradient_rows, input_rows
from spectral_monitor.engine.results.noise import COLUMNS, MOMENTS
from spectral_monitor.engine.results.raw import NETWORK, RawScalars
from spectral_monitor.engine.results.reasons import StepContext
from spectral_monitor.functional.features import channel_sizes, feature_kurtosis, outlier_ratio, underflow_share
from spectral_monitor.functional.noise import noise_moments
from spectral_monitor.linalg import AllReduce, Coroutine, gather, rank_table

FORMATS = {"underflow_inputs": torch.float8_e4m3fn, "underflow_backward": torch.float8_e5m2}
"""Quantity -> the format that its rows are cast to."""
CHANNELS = frozenset({"feature_kurtosis", "outlier_ratio"})
OF_ROWS = CHANNELS | FORMATS.keys() | {"log_z"}
"""Quantities that this module measures on rows."""
DIVIDED = "its outputs are sharded over processes"


def measure_outputs(
    rows: RowStage, keys: frozenset[str], calls: Calls, outputs: Outputs, facts: StepContext
) -> Coroutine[None]:
    """Put the requested quantities among :data:`OF_ROWS`."""
    layers = sorted(rows.reports.wherever_called("has_outputs"))
    features = {i: joined([call.h for call in outputs.get(i, ())]) for i in layers}
    routines = [_channels(rows, features)] if keys & CHANNELS else []
    if "log_z" in keys:
        readouts = {i: h for i, h in features.items() if rows.members[i].layer.info.role == "readout"}
        divided = {i for i in readouts if rows.cols(i, "h") is not None}
        facts.why_not.update({("log_z", i): DIVIDED for i in divided})
        means = {i: None if h is None else h.logsumexp(1).mean() for i, h in readouts.items() if i not in divided}
        routines.append(_means(rows, "log_z", means))
    sources = {"underflow_inputs": ("has_inputs", input_rows), "underflow_backward": ("has_gradients", gradient_rows)}
    for key, (attribute, rows_of) in sources.items():
        if key in keys:
            tensors = {i: rows_of(calls.get(i, ())) for i in sorted(rows.reports.wherever_called(attribute))}
            shares = {i: None if x is None else underflow_share([x], FORMATS[key]) for i, x in tensors.items()}
            routines.append(_means(rows, key, shares))
    yield from gather(routines)


def _channels(rows: RowStage, features: Mapping[int, Tensor | None]) -> Coroutine[None]:
    """Put quantities of the sizes of channels, over the rows of all processes."""
    tables = []
    for i, h in features.items():
        device = None if h is None else h.device
        table = torch.zeros(2, rows.feature_count(i, "h"), dtype=torch.float64, device=device)
        if h is not None:
            table[:, rows.columns(i, "h")] = channel_sizes(h)
        tables.append(rank_table(table, rows.exchange))
    tables = yield tables
    for i, table in zip(features, tables, strict=True):
        rows.out.put(i, "feature_kurtosis", feature_kurtosis(table[:, 0].sum(0)))
        rows.out.put(i, "outlier_ratio", outlier_ratio(table[:, 1].amax(0)))


def _means(rows: RowStage, name: str, local: Mapping[int, Tensor | None]) -> Coroutine[None]:
    """Put the mean over processes of each layer's number; ``None`` where this process has none."""
    if not local:
        return
    device = next((x.device for x in local.values() if x is not None), torch.device("cpu"))
    zeros = torch.zeros(2, device=device)
    pairs = [zeros if x is None else torch.stack([x, torch.ones_like(x)]).to(device) for x in local.values()]
    (sums,) = yield [torch.stack(pairs)]
    for i, (total, count) in zip(local, sums, strict=True):
        rows.out.put(i, name, total / count)


def measure_noise(calls: Calls, layers: int, exchange: AllReduce | None, out: RawScalars) -> Coroutine[None]:
    """Put the moments of each layer, and of all layers together, one row for each process."""
    products = {}
    for i, recorded in calls.items():
        checked = recorded[0].checked
        if len(recorded) == recorded[0].b_count == 1 and checked is not None and checked.products is not None:
            products[i] = checked.products
    device = next((squares.device for squares, _ in products.values()), torch.device("cpu"))
    table = torch.zeros(layers + 1, COLUMNS, dtype=torch.float64, device=device)
    for i, pair in products.items():
        table[i, 0], table[i, 1:] = 1, noise_moments(*pair)
    if len({len(squares) for squares, _ in products.values()}) == 1:
        squares, along = (sum(part.to(device) for part in parts) for parts in zip(*products.values(), strict=True))
        table[layers, 0], table[layers, 1:] = len(products), noise_moments(squares, along)
    tables = table[None]
    if exchange is not None:
        (tables,) = yield [rank_table(table.float(), exchange)]
    for i in range(layers + 1):
        out.put(NETWORK if i == layers else i, MOMENTS, tables[:, i])
