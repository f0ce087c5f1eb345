"""Families of layers in a chart: the same place in every block, as its lowest, median and highest value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from spectral_monitor.reporting.html.figures import Figure, digits, escaped, line

COLOURS = ("#3b6fd8", "#d9822b", "#2a9d8f", "#a04fc4", "#8a7a1f", "#c2508a", "#5b7083", "#1f8fb5", "#7a9a2e")
"""Of families, in their order; they can be told apart on white and on black."""


def colour(place: int) -> str:
    """Return the colour of a family.

    Example:
        >>> colour(0), colour(len(COLOURS))
        ('#3b6fd8', '#3b6fd8')
    """
    return COLOURS[place % len(COLOURS)]


def family_traces(
    key: str, values: Tensor, families: Mapping[str, Sequence[int]], log: bool, low: float
) -> Iterator[Figure]:
    """Yield three traces a family: its lowest and its highest value with the area between them, and its median.

    Args:
        key: the quantity, whose steps are the x axis.
        values: (layers, steps), all layers of the chart.
        families: name -> places in ``values``, at least two.
        log, low: whether the y axis is logarithmic, and its bottom, where smaller values are drawn.
    """
    for place, (name, some) in enumerate(families.items()):
        of = values[list(some)]
        ends = (of.nan_to_num(nan=torch.inf).amin(0), of.nan_to_num(nan=-torch.inf).amax(0), of.nanmedian(0).values)
        lowest, highest, median = ((x.clamp(min=low) if log else x).where(x.isfinite(), torch.nan) for x in ends)
        tint = colour(place)
        group = {"legendgroup": escaped(name)}
        edge = {**group, "line": {"color": tint, "width": 0}, "hoverinfo": "skip"}
        area = {"fill": "tonexty", "fillcolor": f"{tint}38"}
        yield line(key, digits(lowest.tolist()), uid=f"F{key}_{place}l", **edge)
        yield line(key, digits(highest.tolist()), uid=f"F{key}_{place}h", **edge, **area)
        yield line(
            key,
            digits(median.tolist()),
            uid=f"F{key}_{place}m",
            line={"color": tint, "width": 2.2},
            hovertemplate=f"<b>{escaped(name)}</b>, median of {len(some)}<br>step %{{x}}<br>{key} "
            "%{y:.3~g}<extra></extra>",
            **group,
        )
