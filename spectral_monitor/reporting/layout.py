"""The Custom Scalars tab of TensorBoard: a category for each question, in it a chart for each kind of layer."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from spectral_monitor.measurement import LayerInfo, Measurement
from spectral_monitor.reporting.kinds import kinds
from spectral_monitor.reporting.panels import PANELS, Panel, shown
from spectral_monitor.reporting.typical import VS_TYPICAL

if TYPE_CHECKING:
    from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

MARGIN, SUMMARY = "spectral/margin", "spectral/summary"
FAR = 24.0
"""Powers of two: a value that is further from where it should be, such as 0, is drawn there."""
MANY = 24
"""Of more charts than that, only the first category is open at first."""

Content = frozenset[tuple[str, ...]]
"""What there is to show: ``(quantity, kind)``, ``("margin", quantity, kind)`` and ``("summary", name)``."""

# What charts are called; those of margins, where that is something else.
TITLES = {
    "update_natural": "size of the update",
    "update_ratio": "size of the update over that of the weights",
    "feature_change": "change of the outputs by a step",
    "feature_drift": "change of the outputs since the start",
    "weight_natural": "size of the weights",
    "drift_ratio": "change of the weights since the start",
    "alignment": "alignment of inputs and weights",
    "update_alignment": "alignment of inputs and update",
    "update_stable_rank": "stable rank of the update",
    "weight_stable_rank": "stable rank of the weights",
    "bfa_cos": "cosine of how outputs move and where the loss wants them",
    "contribution": "decrease of the loss that the update promises",
    "lr_multiplier": "what the learning rate is multiplied with",
    "lr": "learning rate",
}
OUT_OF_LINE = {
    "update_natural": f"size of the update {VS_TYPICAL}",
    "weight_natural": f"size of the weights {VS_TYPICAL}",
}


@dataclass(frozen=True)
class Margin:
    """Where the layers of a kind are, on a logarithmic scale: a value outside ``low .. high`` is out of line.

    Attributes:
        quantity: a key of the measurement.
        kind: of layers.
        value: logarithm to base 2 of value over reference, of the layer that is closest to a limit or furthest beyond
            one; of the value itself where there is a limit but no reference.
        low: the same of its lower limit; where it has none, somewhat below what is to be seen.
        high: of its upper limit.
    """

    quantity: str
    kind: str
    value: float
    low: float
    high: float

    def scalars(self) -> dict[str, float]:
        """Tag -> value."""
        tag = f"{MARGIN}/{self.quantity}/{self.kind}"
        return {tag: self.value, f"{tag}/low": self.low, f"{tag}/high": self.high}


def margins(measurement: Measurement) -> list[Margin]:
    """One for each kind of layer and each quantity that is held against a band; all numbers are finite.

    Example:
        >>> import torch
        >>> layers = tuple(LayerInfo(f"net.{i}", "operator", 8, 8, (8, 8)) for i in range(3))
        >>> values = {"update_natural": torch.tensor([0.1, 0.1, 0.8])}
        >>> bands = {"update_natural": torch.tensor([[0.025, 0.4, 0.1]] * 3)}
        >>> margins(Measurement(50, layers, values, {}, bands=bands))
        [Margin(quantity='update_natural', kind='net.*', value=3.0, low=-2.0, high=2.0)]
    """
    found = []
    for panel in PANELS:
        for quantity in panel.quantities:
            if quantity in measurement.bands and quantity in measurement.values:
                for kind, rows in _kinds(panel, measurement.layers).items():
                    margin = _margin(measurement, quantity, rows)
                    if margin is not None:
                        found.append(Margin(quantity, kind, *margin))
    return found


def _margin(measurement: Measurement, quantity: str, rows: Sequence[int]) -> tuple[float, float, float] | None:
    worst, where = -math.inf, None
    values = measurement.values[quantity][rows].double().tolist()
    for value, (low, high, reference) in zip(values, measurement.bands[quantity][rows].double().tolist(), strict=True):
        if math.isnan(value) or math.isnan(low) or math.isnan(high) or (low <= 0 and math.isinf(high)):
            continue
        value, low, high = (_log(number, 1.0 if math.isnan(reference) else reference) for number in (value, low, high))
        out = max(value - high, low - value)
        if where is None or out > worst:
            worst, where = out, (value, low, high)
    if where is None:
        return None
    value, low, high = where
    value = max(value, min(-FAR, low - 1)) if math.isfinite(low) else max(value, -FAR)
    value = min(value, max(FAR, high + 1)) if math.isfinite(high) else min(value, FAR)
    low = min(-abs(high), value - 1) if math.isinf(low) else low
    high = max(abs(low), value + 1) if math.isinf(high) else high
    return value, low, high


def _log(value: float, reference: float) -> float:
    return math.log2(value / reference) if value > 0 else -math.inf


def content(layers: Sequence[LayerInfo], tags: Container[str]) -> Content:
    """What there is to show.

    Args:
        layers: of a measurement.
        tags: its scalars and those of its margins.
    """
    some: set[tuple[str, ...]] = set()
    for panel in PANELS:
        some |= {("summary", key) for key in panel.summaries if f"{SUMMARY}/{key}" in tags}
        for kind, rows in _kinds(panel, layers).items():
            some |= {("margin", key, kind) for key in panel.quantities if f"{MARGIN}/{key}/{kind}" in tags}
            names = [layers[i].name for i in rows]
            some |= {(key, kind) for key in panel.quantities if any(f"spectral/{key}/{name}" in tags for name in names)}
    return frozenset(some)


def layout(layers: Sequence[LayerInfo], some: Content) -> Layout:
    """The charts for what there is to show, as TensorBoard's protocol buffer; no category is empty.

    Args:
        layers: of the measurements.
        some: what was measured so far.
    """
    from tensorboard.plugins.custom_scalar.layout_pb2 import Category, Layout

    drawn = [(panel.question, list(_charts(panel, layers, some))) for panel in PANELS]
    drawn = [(question, charts) for question, charts in drawn if charts]
    many = sum(len(charts) for _, charts in drawn) > MANY
    categories = [Category(title=name, chart=charts, closed=many and i > 0) for i, (name, charts) in enumerate(drawn)]
    return Layout(category=categories)


def _charts(panel: Panel, layers: Sequence[LayerInfo], some: Content) -> Iterator[Any]:
    """The whole network, every layer, and how far layers are out of line, kind by kind.

    The last are margin charts, in reverse: TensorBoard shows them after all others, the last one first.
    """
    from tensorboard.plugins.custom_scalar.layout_pb2 import Chart, MarginChartContent, MultilineChartContent

    names = [info.name for info in layers]
    of_kinds = _kinds(panel, layers)
    for group in _groups([key for key in panel.summaries if ("summary", key) in some]):
        tags = [f"{re.escape(f'{SUMMARY}/{key}')}$" for key in group]
        yield Chart(title=f"whole network: {', '.join(group)}", multiline=MultilineChartContent(tag=tags))
    pairs = [(quantity, kind) for quantity in panel.quantities for kind in of_kinds]
    for quantity, kind in pairs:
        if (quantity, kind) in some:
            tag = re.escape(f"spectral/{quantity}/") + pattern([names[i] for i in of_kinds[kind]], names) + "$"
            title = f"{kind}: {TITLES[quantity]} ({quantity})"
            yield Chart(title=title, multiline=MultilineChartContent(tag=[tag]))
    for quantity, kind in reversed(pairs):
        if ("margin", quantity, kind) in some:
            tag = f"{MARGIN}/{quantity}/{kind}"
            series = MarginChartContent.Series(value=tag, lower=f"{tag}/low", upper=f"{tag}/high")
            title = f"{kind}: {OUT_OF_LINE.get(quantity, TITLES[quantity])}, log2; outside the shade is out of line"
            yield Chart(title=title, margin=MarginChartContent(series=[series]))


def _kinds(panel: Panel, layers: Sequence[LayerInfo]) -> dict[str, list[int]]:
    """Kind -> places of those of its layers that a panel shows."""
    rows = shown(panel, layers)
    found = _cached_kinds(tuple(layers[i].name for i in rows))
    return {kind: [rows[k] for k in places] for kind, places in found.items()}


_cached_kinds = lru_cache(maxsize=4)(kinds)
"""The layers are the same at every measurement."""


def _groups(names: Sequence[str]) -> list[list[str]]:
    """Names that begin with another one share its chart.

    Example:
        >>> _groups(["spread", "loss", "loss_predicted"])
        [['spread'], ['loss', 'loss_predicted']]
    """
    first = [name for name in names if not any(name.startswith(f"{other}_") for other in names)]
    return [[name for name in names if name == head or name.startswith(f"{head}_")] for head in first]


def pattern(names: Sequence[str], among: Sequence[str]) -> str:
    r"""A regular expression that matches these names and none of the others in full.

    If one will do, it is the same for any number of layers, for TensorBoard shows equal charts of several runs as one.

    Args:
        names: to be matched.
        among: all names there are.

    Example:
        >>> pattern(["net.0.w+b", "net.2.w+b"], ["net.0.w+b", "net.0.bias", "net.2.w+b"])
        'net\\.\\d+\\.w\\+b'
        >>> pattern(["net.0", "net.2"], ["net.0", "net.1", "net.2"])
        '(?:net\\.0|net\\.2)'
    """
    parts = names[0].split(".")
    place = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    if place is not None and len(names) > 1:
        numbered = r"\.".join([r"\d+" if i == place else re.escape(part) for i, part in enumerate(parts)])
        if {name for name in among if re.fullmatch(numbered, name)} == set(names):
            return numbered
    return f"(?:{'|'.join(map(re.escape, names))})" if len(names) > 1 else re.escape(names[0])
