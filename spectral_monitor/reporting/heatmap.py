"""Pictures of layer by step: where in the network something is wrong, and since when."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from spectral_monitor.measurement import LayerInfo
from spectral_monitor.quantities import QUANTITIES
from spectral_monitor.reporting.content.history import History, Thinned
from spectral_monitor.reporting.content.labels import labelled, named
from spectral_monitor.reporting.content.tally import off
from spectral_monitor.reporting.content.typical import VS_TYPICAL, powers_of_two
from spectral_monitor.reporting.text.lines import printable

WIDTH = 640
ROW, ROWS_LOW, ROWS_HIGH = 20, 140, 600
"""Pixels of a layer, and of all of them at least and at most."""
ABOVE, BELOW, BAR = 35, 45, 95
"""Room for the title, for the steps and for the colour bar."""
LINE, LETTER = 15, 7
"""Room for a name, and for a letter of one."""
TICKS = 8
"""Steps that are written below."""
BLACK, RED = (0, 0, 0), (204, 34, 34)
"""Red are layers that a root verdict names."""
LEVELS = 65
"""Colours of values."""
NOTHING = "0.8"
"""Grey: not measured, or held against nothing."""
DECADES, FAR = 6, 12.0
"""Powers of ten below the largest value, and of two around a reference; what is beyond has the colour of the last."""

Pixels = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class _Scale:
    """A scale from values to colours: ``shown`` from ``low`` to ``high``, ticks of the colour bar with their labels."""

    title: str
    shown: Tensor
    low: float
    high: float
    colours: str
    ticks: tuple[float, ...]
    labels: tuple[str, ...]
    limits: tuple[float, ...] = ()

    def place(self, value: float) -> float:
        """Return the place of a value on the colour bar, 0 at its top and 1 at its bottom."""
        return (self.high - value) / (self.high - self.low)


def can_draw() -> bool:
    """Return whether matplotlib is installed; without it there are no pictures."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def heatmap(history: History, quantity: str) -> Pixels | None:
    """Draw a picture of a quantity, a row for each matrix and a column for each measurement that has it.

    A quantity with a reference, such as ``update_natural``, is shown as its ratio to that; lines on the colour bar are
    the limits of the band. What was not measured is grey, the names of layers that are off now are red.
    Settings of matplotlib are neither used nor changed.

    Returns:
        (height, width, 3) in RGB; ``None`` where no matrix has a finite value, or without matplotlib.
    """
    rows = [i for i, info in enumerate(history.layers) if info.is_matrix]
    drawn = history.of(quantity)
    scale = _scale(drawn, quantity, rows)
    if scale is None or not can_draw():
        return None
    known = (~scale.shown.isnan()).any(1).tolist()
    layers = [history.layers[i] for i, some in zip(rows, known, strict=True) if some]
    outside = set(off(history.measurements[-1]))
    short = labelled(tuple(history.layers[i].name for i in rows))
    return _draw(scale, scale.shown[known], layers, short, drawn.steps, outside)


def _scale(history: Thinned, quantity: str, rows: Sequence[int]) -> _Scale | None:
    """Return the scale of a picture; ``None`` where there is nothing to show."""
    title = (QUANTITIES[quantity].picture if quantity in QUANTITIES else "") or quantity
    ratios = history.ratios(quantity)[rows]
    if ratios.isfinite().any():
        return _against_reference(title, ratios, _limits(history, quantity, rows))
    values = history.values(quantity)[rows]
    if not values.isfinite().any():
        return None
    if quantity == "bfa_cos":
        ticks = (-1.0, -0.5, 0.0, 0.5, 1.0)
        return _Scale(title, values, -1.0, 1.0, "RdBu", ticks, tuple(f"{tick:g}" for tick in ticks))
    return _logarithmic(title, values)


def _limits(history: Thinned, quantity: str, rows: Sequence[int]) -> tuple[float, ...]:
    """Return low and high over the reference: the medians over the layers at the last measurement with bands."""
    for measurement in reversed(history.measurements):
        if quantity in measurement.bands:
            band = measurement.bands[quantity][rows]
            ratios = (band[:, :2] / band[:, 2:]).nanmedian(0).values.tolist()
            return tuple(ratio for ratio in ratios if math.isfinite(ratio) and ratio > 0)
    return ()


def _against_reference(title: str, ratios: Tensor, limits: tuple[float, ...]) -> _Scale:
    """Return colours by the logarithm to base 2, as far on both sides as the values go, within reason."""
    shown = ratios.log2()
    lines = tuple(math.log2(limit) for limit in limits)
    far = shown[shown.isfinite()].abs().max().item() if shown.isfinite().any() else 0.0
    reach = max(min(far, FAR), 1.5 * max(map(abs, lines), default=1.0))
    ticks, labels = powers_of_two(reach)
    title = f"{title} {VS_TYPICAL}" + (" (black: the limits)" if lines else "")
    return _Scale(title, shown, -reach, reach, "RdBu_r", tuple(ticks), tuple(labels), lines)


def _logarithmic(title: str, values: Tensor) -> _Scale:
    shown = values.log10()  # NaN where negative
    finite = shown[shown.isfinite()]
    high = math.ceil(finite.max().item()) if len(finite) else 0
    low = math.floor(max(finite.min().item(), high - DECADES)) if len(finite) else -1
    low = min(low, high - 1)
    ticks = tuple(float(k) for k in range(low, high + 1))
    return _Scale(title, shown, low, high, "viridis", ticks, tuple(f"{10**tick:g}" for tick in ticks))


def _draw(
    scale: _Scale,
    shown: Tensor,
    layers: Sequence[LayerInfo],
    short: Mapping[str, str],
    steps: Sequence[int],
    outside: set[str],
) -> Pixels:
    """Draw with matplotlib's colours and fonts, but without its figures, which take thirty times as long."""
    import matplotlib as mpl

    rows, columns = shown.shape
    high = min(max(ROW * rows, ROWS_LOW), ROWS_HIGH)
    written = named([info.name in outside for info in layers], high // LINE)
    texts = {i: printable(short[layers[i].name]) for i in written}  # a line that ends would end the drawing
    left = 25 + LETTER * max(map(len, texts.values()))
    right, bottom = WIDTH - BAR, ABOVE + high
    labels = [_Label(WIDTH / 2, ABOVE / 2, scale.title, size=13)]
    labels.append(_Label((left + right) / 2, bottom + 33, "optimizer step", size=12))
    for i, text in texts.items():
        y, out = ABOVE + (i + 0.5) * high / rows, layers[i].name in outside
        labels.append(_Label(left - 10, y, text, anchor="rm", bold=out, colour=RED if out else BLACK))
    for k in sorted({round(k) for k in np.linspace(0, columns - 1, min(TICKS, columns))}):
        labels.append(_Label(left + (k + 0.5) * (right - left) / columns, bottom + 11, str(steps[k])))
    for tick, text in zip(scale.ticks, scale.labels, strict=True):
        labels.append(_Label(right + 48, ABOVE + scale.place(tick) * high, text, anchor="lm"))
    pixels = _written(labels, bottom + BELOW)

    colours = mpl.colormaps[scale.colours].resampled(LEVELS).with_extremes(bad=NOTHING)
    share = (shown.clamp(scale.low, scale.high).numpy() - scale.low) / (scale.high - scale.low)  # log 0 is the lowest
    _fill(pixels, left, right, high, colours(np.ma.masked_invalid(share), bytes=True)[:, :, :3])
    _fill(pixels, right + 15, right + 40, high, colours(np.linspace(1, 0, 256)[:, None], bytes=True)[:, :, :3])
    for limit in scale.limits:
        at = ABOVE + round(scale.place(limit) * high)
        pixels[at - 1 : at + 1, right + 15 : right + 40] = BLACK
    for i in (i for i, info in enumerate(layers) if info.name in outside):
        pixels[ABOVE + i * high // rows : ABOVE + (i + 1) * high // rows, left - 6 : left - 3] = RED
    return pixels


@dataclass(frozen=True)
class _Label:
    x: float
    y: float
    text: str
    anchor: str = "mm"
    size: int = 11
    bold: bool = False
    colour: tuple[int, int, int] = BLACK


def _written(labels: Sequence[_Label], height: int) -> Pixels:
    """Return a white picture with the labels."""
    import matplotlib as mpl
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (WIDTH, height), "white")
    draw = ImageDraw.Draw(image)
    folder = Path(mpl.get_data_path(), "fonts", "ttf")
    kinds = {(label.bold, label.size) for label in labels}
    names = {True: "DejaVuSans-Bold.ttf", False: "DejaVuSans.ttf"}
    fonts = {(bold, size): ImageFont.truetype(str(folder / names[bold]), size) for bold, size in kinds}
    for label in labels:
        font = fonts[label.bold, label.size]
        draw.text((label.x, label.y), label.text, fill=label.colour, font=font, anchor=label.anchor)
    return np.asarray(image) // 17 * 17  # few colours make small files


def _fill(pixels: Pixels, left: int, right: int, high: int, colours: Pixels) -> None:
    """Draw a table of colours, with a frame around it."""
    down, across = (np.arange(n) * k // n for n, k in zip((high, right - left), colours.shape, strict=False))
    pixels[ABOVE - 1 : ABOVE + high + 1, left - 1 : right + 1] = BLACK
    pixels[ABOVE : ABOVE + high, left:right] = colours[down][:, across]
