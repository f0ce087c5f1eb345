"""Families of layers in a chart, each as its lowest, median and highest value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from spectral_monitor.reporting.content.labels import quantity_title
from spectral_monitor.reporting.html.figures import Figure, digits, escaped, line

COLOURS = ("#3b6fd8", "#d9822b", "#2a9d8f", "#a04fc4", "#8a7a1f", "#c2508a", "#5b7083", "#1f8fb5", "#7a9a2e")
"""Colours of families, in their order; they are distinct on white and on black."""


def colour(index: int) -> str:
    """Return the colour of a family.

    Example:
        >>> colour(0), colour(len(COLOURS))
        ('#3b6fd8', '#3b6fd8')
    """
    return COLOURS[index % len(COLOURS)]


def family_traces(
    key: str, values: Tensor, families: Mapping[str, Sequence[int]], log: bool, low: float
) -> Iterator[Figure]:
    """Yield three traces for each family: its lowest and its highest value with the area between, and its median.

    Args:
        key: the quantity, whose steps are the x axis.
        values: (layers, steps), all layers of the chart.
        families: name -> rows of ``values``, at least two.
        log, low: whether the y axis is logarithmic, and its bottom, where smaller values are drawn.
    """
    for index, (name, members) in enumerate(families.items()):
        rows = values[list(members)]
        edges = (rows.nan_to_num(nan=torch.inf).amin(0), rows.nan_to_num(nan=-torch.inf).amax(0))
        lowest, highest, median = (
            (x.clamp(min=low) if log else x).where(x.isfinite(), torch.nan) for x in (*edges, rows.nanmedian(0).values)
        )
        tint = colour(index)
        group = {"legendgroup": escaped(name)}
        edge = {**group, "line": {"color": tint, "width": 0}, "hoverinfo": "skip"}
        area = {"fill": "tonexty", "fillcolor": f"{tint}38"}
        yield line(key, digits(lowest.tolist()), uid=f"F{key}_{index}l", **edge)
        yield line(key, digits(highest.tolist()), uid=f"F{key}_{index}h", **edge, **area)
        yield line(
            key,
            digits(median.tolist()),
            uid=f"F{key}_{index}m",
            line={"color": tint, "width": 2.2},
            hovertemplate=f"<b>{escaped(name)}</b>, median of {len(members)}<br>step %{{x}}<br>{quantity_title(key)} "
            "%{y:.3~g}<extra></extra>",
            **group,
        )
