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
from spectral_monitor.reporting.content.labels import labelled, rows_with_names
from spectral_monitor.reporting.content.tally import off
from spectral_monitor.reporting.content.typical import VS_TYPICAL, powers_of_two
from spectral_monitor.reporting.text.lines import printable

WIDTH = 640
ROW, ROWS_LOW, ROWS_HIGH = 20, 140, 600
"""Pixels of a row, and of all rows at least and at most."""
ABOVE, BELOW, BAR = 35, 45, 95
"""Pixels of the title, of the steps and of the colour bar."""
LINE, LETTER = 15, 7
"""Pixels of a name's height, and of a letter's width."""
MAX_STEP_LABELS = 8
"""Steps that are written below a picture."""
BLACK, RED = (0, 0, 0), (204, 34, 34)
"""Layers that a root verdict names are red."""
LEVELS = 65
"""Number of colours for values."""
MISSING = "0.8"
"""The grey of values that were not measured or have no reference."""
MAX_DECADES, MAX_REACH = 6, 12.0
"""Powers of ten below the largest value, and of two around a reference; values beyond have the last colour."""

Pixels = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class _Scale:
    """A scale from values to colours."""

    title: str
    values: Tensor  # (layers, steps), on the scale
    low: float  # the value with the first colour
    high: float  # the value with the last colour
    colours: str  # name of matplotlib's colormap
    ticks: tuple[float, ...]  # of the colour bar
    labels: tuple[str, ...]  # of the ticks
    limits: tuple[float, ...] = ()  # of the band, as lines on the colour bar

    def position(self, value: float) -> float:
        """Return the position of a value on the colour bar, 0 at its top and 1 at its bottom."""
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
    the limits of the band. Missing values are grey, the names of layers that are off now are red. Settings of
    matplotlib are neither used nor changed.

    Returns:
        (height, width, 3) in RGB; ``None`` if no matrix has a finite value, or without matplotlib.
    """
    rows = [i for i, info in enumerate(history.layers) if info.is_matrix]
    measured = history.of(quantity)
    scale = _scale(measured, quantity, rows)
    if scale is None or not can_draw():
        return None
    has_values = (~scale.values.isnan()).any(1).tolist()
    layers = [history.layers[i] for i, is_shown in zip(rows, has_values, strict=True) if is_shown]
    off_layers = set(off(history.measurements[-1]))
    labels = labelled(tuple(history.layers[i].name for i in rows))
    return _draw(scale, scale.values[has_values], layers, labels, measured.steps, off_layers)


def _scale(history: Thinned, quantity: str, rows: Sequence[int]) -> _Scale | None:
    """Return the scale of a picture; ``None`` if there is nothing to show."""
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
    """Return low and high over the reference, as medians over the layers at the last measurement with bands."""
    for measurement in reversed(history.measurements):
        if quantity in measurement.bands:
            band = measurement.bands[quantity][rows]
            ratios = (band[:, :2] / band[:, 2:]).nanmedian(0).values.tolist()
            return tuple(ratio for ratio in ratios if math.isfinite(ratio) and ratio > 0)
    return ()


def _against_reference(title: str, ratios: Tensor, limits: tuple[float, ...]) -> _Scale:
    """Return a scale by the logarithm to base 2, symmetric about 1, that covers values and limits."""
    logs = ratios.log2()
    lines = tuple(math.log2(limit) for limit in limits)
    finite = logs[logs.isfinite()]
    farthest = finite.abs().max().item() if len(finite) else 0.0
    reach = max(min(farthest, MAX_REACH), 1.5 * max(map(abs, lines), default=1.0))
    ticks, labels = powers_of_two(reach)
    title = f"{title} {VS_TYPICAL}" + (" (black: the limits)" if lines else "")
    return _Scale(title, logs, -reach, reach, "RdBu_r", tuple(ticks), tuple(labels), lines)


def _logarithmic(title: str, values: Tensor) -> _Scale:
    logs = values.log10()  # NaN where negative
    finite = logs[logs.isfinite()]
    high = math.ceil(finite.max().item()) if len(finite) else 0
    low = math.floor(max(finite.min().item(), high - MAX_DECADES)) if len(finite) else -1
    low = min(low, high - 1)
    ticks = tuple(float(k) for k in range(low, high + 1))
    return _Scale(title, logs, low, high, "viridis", ticks, tuple(f"{10**tick:g}" for tick in ticks))


def _draw(
    scale: _Scale,
    values: Tensor,
    layers: Sequence[LayerInfo],
    names: Mapping[str, str],
    steps: Sequence[int],
    off_layers: set[str],
) -> Pixels:
    """Draw with matplotlib's colours and fonts, but without its figures, which take thirty times as long."""
    import matplotlib as mpl

    rows, columns = values.shape
    height = min(max(ROW * rows, ROWS_LOW), ROWS_HIGH)
    is_off = [info.name in off_layers for info in layers]
    # Names are made printable because a line break would break the drawing.
    texts = {i: printable(names[layers[i].name]) for i in rows_with_names(is_off, height // LINE)}
    left = 25 + LETTER * max(map(len, texts.values()))
    right, bottom = WIDTH - BAR, ABOVE + height
    labels = [_Label(WIDTH / 2, ABOVE / 2, scale.title, size=13)]
    labels.append(_Label((left + right) / 2, bottom + 33, "optimizer step", size=12))
    for i, text in texts.items():
        y = ABOVE + (i + 0.5) * height / rows
        labels.append(_Label(left - 10, y, text, anchor="rm", bold=is_off[i], colour=RED if is_off[i] else BLACK))
    for k in sorted({round(k) for k in np.linspace(0, columns - 1, min(MAX_STEP_LABELS, columns))}):
        labels.append(_Label(left + (k + 0.5) * (right - left) / columns, bottom + 11, str(steps[k])))
    for tick, text in zip(scale.ticks, scale.labels, strict=True):
        labels.append(_Label(right + 48, ABOVE + scale.position(tick) * height, text, anchor="lm"))
    pixels = _written(labels, bottom + BELOW)

    colours = mpl.colormaps[scale.colours].resampled(LEVELS).with_extremes(bad=MISSING)
    share = (values.clamp(scale.low, scale.high).numpy() - scale.low) / (scale.high - scale.low)  # log 0 is the lowest
    _fill(pixels, left, right, height, colours(np.ma.masked_invalid(share), bytes=True)[:, :, :3])
    _fill(pixels, right + 15, right + 40, height, colours(np.linspace(1, 0, 256)[:, None], bytes=True)[:, :, :3])
    for limit in scale.limits:
        y = ABOVE + round(scale.position(limit) * height)
        pixels[y - 1 : y + 1, right + 15 : right + 40] = BLACK
    for i in (i for i in range(rows) if is_off[i]):
        pixels[ABOVE + i * height // rows : ABOVE + (i + 1) * height // rows, left - 6 : left - 3] = RED
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
    styles = {(label.bold, label.size) for label in labels}
    files = {True: "DejaVuSans-Bold.ttf", False: "DejaVuSans.ttf"}
    fonts = {(bold, size): ImageFont.truetype(str(folder / files[bold]), size) for bold, size in styles}
    for label in labels:
        font = fonts[label.bold, label.size]
        draw.text((label.x, label.y), label.text, fill=label.colour, font=font, anchor=label.anchor)
    return np.asarray(image) // 17 * 17  # few colours make small files


def _fill(pixels: Pixels, left: int, right: int, height: int, colours: Pixels) -> None:
    """Draw a table of colours, with a frame around it."""
    rows, columns = (np.arange(n) * k // n for n, k in zip((height, right - left), colours.shape, strict=False))
    pixels[ABOVE - 1 : ABOVE + height + 1, left - 1 : right + 1] = BLACK
    pixels[ABOVE : ABOVE + height, left:right] = colours[rows][:, columns]
