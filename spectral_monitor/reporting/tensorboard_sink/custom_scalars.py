"""The Custom Scalars tab of TensorBoard: a category for each question, whose first chart answers it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from spectral_monitor.measurement import LayerInfo
from spectral_monitor.quantities import QUANTITIES
from spectral_monitor.reporting.content.essentials import (
    ALL,
    LIMITS,
    PREFIX,
    SPREAD,
    Groups,
    family_key,
    group,
    grouped,
    log2_of,
)
from spectral_monitor.reporting.content.labels import unprefixed
from spectral_monitor.reporting.content.panels import PANELS, Panel
from spectral_monitor.reporting.content.typical import VS_TYPICAL

if TYPE_CHECKING:
    from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

SUMMARY = f"{PREFIX}/summary"
ENDS = f"/(?:{'|'.join(SPREAD)})"
"""A regular expression for the statistics after the name of a family."""
MAX_OPEN_CHARTS = 24
"""If there are more charts, only the first category is open at first."""


def layout(layers: tuple[LayerInfo, ...], tags: Collection[str]) -> Layout:
    """Return the categories with charts, as TensorBoard's protocol buffer.

    ``tags``: of all numbers so far.
    """
    from tensorboard.plugins.custom_scalar.layout_pb2 import Category, Layout

    charts = {panel.question: list(_charts(panel, layers, tags)) for panel in PANELS}
    questions = [question for question in charts if charts[question]]
    many = sum(map(len, charts.values())) > MAX_OPEN_CHARTS
    categories = [Category(title=name, chart=charts[name], closed=many and i > 0) for i, name in enumerate(questions)]
    return Layout(category=categories)


def _charts(panel: Panel, layers: tuple[LayerInfo, ...], tags: Collection[str]) -> Iterator[Any]:
    """Yield the charts of a question, the one that answers it first."""
    from tensorboard.plugins.custom_scalar.layout_pb2 import Chart, MultilineChartContent

    quantities = list(_of_quantities(panel, layers, tags))
    summaries = [
        (f"whole network: {', '.join(names)}", [f"{re.escape(f'{SUMMARY}/{name}')}$" for name in names])
        for names in _groups([key for key in panel.summaries if f"{SUMMARY}/{key}" in tags])
    ]
    index = 0 if panel.by_summary else 1
    for title, patterns in [*quantities[:index], *summaries, *quantities[index:]]:
        yield Chart(title=title, multiline=MultilineChartContent(tag=patterns))


def _of_quantities(
    panel: Panel, layers: tuple[LayerInfo, ...], tags: Collection[str]
) -> Iterator[tuple[str, list[str]]]:
    """Yield the title and the patterns of tags of each chart: all layers together first, then the families.

    Charts of few lines still show a layer that is 100 times too large: by default TensorBoard cuts off the highest 5 %
    of a chart's points.
    """
    groups = grouped(layers)
    for quantity in panel.quantities:
        entry = QUANTITIES[quantity]
        for key, title, band in (
            (log2_of(quantity), f"{entry.title} {VS_TYPICAL}, log2", ""),
            (quantity, f"{entry.title} ({entry.counted_in})", f" (OK: {entry.limits})" if entry.limits else ""),
        ):
            if not any(tag.startswith(f"{group(key)}/") for tag in tags):
                continue
            limits = _limits(key, tags)
            healthy = " (OK in limits)" if limits else band
            if not groups.families:
                names = [layers[i].name for i in groups.singles]
                yield f"{title}{healthy}: every layer", [_pattern(key, names, ""), *limits]
                continue
            yield f"{title}{healthy}: all layers", [_pattern(key, [ALL], ENDS), *limits]
            if key != quantity and panel is PANELS[0]:
                yield from _of_families(key, title, groups, layers, tags)
            else:
                families = [_pattern(key, list(map(family_key, groups.families)), "/median")]
                yield f"{title}: median of each family", [*families, *_singles(key, layers, tags)]


def _of_families(
    key: str, title: str, groups: Groups, layers: tuple[LayerInfo, ...], tags: Collection[str]
) -> Iterator[tuple[str, list[str]]]:
    """Yield a chart for each family, and one for all layers that are logged one by one."""
    limits = _limits(key, tags)
    bare = unprefixed((*groups.families, *(info.name for info in layers)))
    singles = _singles(key, layers, tags)
    if singles:
        yield f"{title}: single layers", [*singles, *limits]
    for family in groups.families:
        yield f"{title}: {bare[family]}", [_pattern(key, [family_key(family)], ENDS), *limits]


def _singles(key: str, layers: tuple[LayerInfo, ...], tags: Collection[str]) -> list[str]:
    """Return the pattern of all layers that are logged one by one, those that ever had a verdict included.

    It does not depend on these layers: if two runs have different charts of one title, TensorBoard shows only one.
    """
    if not any(f"{group(key)}/{info.name}" in tags for info in layers):
        return []
    return [re.escape(f"{group(key)}/") + rf"(?!{LIMITS}/)(?:(?!{ENDS}$).)*$"]


def _limits(key: str, tags: Collection[str]) -> list[str]:
    """Return the pattern of a quantity's limits, if it has any."""
    stem = f"{group(key)}/{LIMITS}/"
    return [f"{re.escape(stem)}(?:low|high)$"] if any(tag.startswith(stem) for tag in tags) else []


def _pattern(key: str, names: Sequence[str], suffix: str) -> str:
    """Return a regular expression for a quantity of these layers or families; ``suffix`` follows a name."""
    alternatives = "|".join(map(re.escape, names))
    return re.escape(f"{group(key)}/") + (f"(?:{alternatives})" if len(names) > 1 else alternatives) + f"{suffix}$"


def _groups(names: Sequence[str]) -> list[list[str]]:
    """Return the names in each chart: names that begin with another one share its chart.

    Example:
        >>> _groups(["spread", "loss", "loss_predicted"])
        [['spread'], ['loss', 'loss_predicted']]
    """
    heads = [name for name in names if not any(name.startswith(f"{other}_") for other in names)]
    return [[name for name in names if name == head or name.startswith(f"{head}_")] for head in heads]
