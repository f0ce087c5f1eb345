"""TensorBoard: the essential numbers, a panel for each question, pictures of layer by step, verdicts as text."""

from __future__ import annotations

import errno
import io
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch

from spectral_monitor.measurement import LayerInfo, Measurement
from spectral_monitor.quantities import QUANTITIES
from spectral_monitor.reporting.content.essentials import PREFIX, Log, checked_log, essentials, group, log2_of
from spectral_monitor.reporting.content.history import History, is_drawn
from spectral_monitor.reporting.content.panels import PANELS, pictured, shown
from spectral_monitor.reporting.content.tally import is_judged, root_keys, tally
from spectral_monitor.reporting.heatmap import can_draw, heatmap
from spectral_monitor.reporting.sinks import check_free_space
from spectral_monitor.reporting.tensorboard_sink import hparams
from spectral_monitor.reporting.tensorboard_sink.custom_scalars import layout
from spectral_monitor.reporting.text.markdown import questions_markdown, verdict_markdown

VERDICTS, QUESTIONS = "spectral/verdicts", "spectral/what_charts_show"
HEATMAP, HISTOGRAM = "spectral/heatmap", "spectral/histogram"
METRICS = tuple(f"{PREFIX}/summary/{key}" for key in ("violations", "worst_layer_ratio"))
"""Metrics in HParams: their values at the end of a run."""
MAX_COLOURS = 128
"""Colours of a picture, at most, which makes its file a third as large."""
NO_PICTURES = "There are no heatmaps of layers over steps: they need matplotlib (`pip install matplotlib`)."


def can_write_to(writer: Any) -> bool:
    """Return whether the writer is torch's ``SummaryWriter``, and not tensorboardX's or a stand-in."""
    return type(writer).__module__.startswith("torch.utils.tensorboard")


class TensorBoardSink:
    """Writes measurements with a ``torch.utils.tensorboard.SummaryWriter``.

    * Scalars: the essential numbers as ``spectral_<quantity>/<layer>``, a group for each quantity; in a deep network
      ``spectral_<quantity>/h.N.mlp/lowest``, ``median`` and ``highest``, and the same for ``all`` layers.
      ``spectral_vs_typical_log2`` is the size of updates over typical, as a power of two, with the limits.
    * Custom Scalars: a category for each question.
    * Images: ``spectral/heatmap/<quantity>``, pictures of layer by step.
    * Text: ``spectral/verdicts``, the answer and the root verdicts whenever they change, and
      ``spectral/what_charts_show``.
    * HParams, if the run has hyperparameters: the number of root verdicts at its end.

    Args:
        writer: it is not closed.
        heatmap_every: pictures after measurements 3 and 10, every n-th and the last, if matplotlib is installed; 0 for
            none.
        histograms: whether the tabs Histograms and Distributions show how the layers' values are spread.
        log: ``"essential"``; ``"all"`` for every number too, as ``spectral/<quantity>/<layer>``; or patterns, such as
            ``["contribution/*"]``, that select single numbers to add.
        asked: further quantities that count as essential.
        offset: added to the number of optimizer steps taken, for loggers that count from 0.

    Example:
        >>> # sink = TensorBoardSink(SummaryWriter("runs/mine"))
        >>> # probe = SpectralProbe(model, optimizer, sinks=[sink])
    """

    def __init__(
        self,
        writer: Any,
        heatmap_every: int = 20,
        histograms: bool = False,
        *,
        log: Log = "essential",
        asked: Sequence[str] = (),
        offset: int = 0,
    ) -> None:
        self._writer = writer
        self._heatmap_every, self._histograms = heatmap_every, histograms
        self._log, self._requested, self._offset = checked_log(log), tuple(asked), offset
        self._reset()
        writer._get_file_writer()  # a writer that was closed after an earlier fit begins another file
        with suppress(OSError):  # the first measurement tries again
            self._add_metrics()

    def _reset(self) -> None:
        """Forget what was written: another run begins."""
        self._history = History()
        self._count = 0
        self._latest: Measurement | None = None
        self._judged: Measurement | None = None
        self._last_pictured: Measurement | None = None
        self._reported: tuple[int, Any] | None = None  # step, roots and state of the text that was written last
        self._laid_out: tuple[tuple[LayerInfo, ...], frozenset[str]] = (
            (),
            frozenset(),
        )  # layers and tags of the charts
        self._merged = False

    def write(self, measurement: Measurement) -> None:
        """Write all numbers in one event; then panels, pictures and verdicts.

        Raises:
            OSError: the writer is closed, its folder is gone, or the disk is nearly full.
        """
        self._check()
        scalars = essentials(measurement, self._log, self._requested)
        values: list[dict[str, Any]] = [{"tag": tag, "simple_value": value} for tag, value in scalars.items()]
        first, self._latest = self._latest is None, measurement
        self._judged = measurement if is_judged(measurement) else self._judged
        self._count += 1
        try:
            # Computations come first: while the writer's thread writes numbers, they would take many times as long.
            values += self._layout(measurement, scalars)
            if self._heatmap_every:
                self._history.add(measurement)
                if is_drawn(self._count, self._heatmap_every):
                    values += self._pictures(measurement)
            if self._histograms:
                self._add_histograms(measurement)
            self._add_verdicts(measurement)
            if first:
                self._add_metrics()
        finally:
            self._add(values, measurement.step)

    def close(self) -> None:
        """Write the last pictures and verdicts; the writer stays open.

        Raises:
            OSError: as for :meth:`write`.
        """
        latest = self._latest
        if latest is None:
            return
        try:
            self._check()
            judged = self._judged or latest
            if self._reported is not None and self._reported[0] != judged.step:
                self._reported = None
                self._add_verdicts(judged)
            if self._heatmap_every and self._last_pictured is not latest:
                self._add(self._pictures(latest), latest.step)
            self._writer.flush()
            self._add_metrics()
        finally:
            self._reset()

    def _check(self) -> None:
        """Refuse to write to a full disk: the writer would keep the error and raise it at the next write."""
        if self._writer.all_writers is None:
            raise OSError(errno.EBADF, "the SummaryWriter is closed")
        check_free_space(self._writer.get_logdir())

    def _add(self, values: list[dict[str, Any]], step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(**value) for value in values])
        self._writer._get_file_writer().add_summary(summary, step + self._offset)

    def _add_metrics(self) -> None:
        """Add metrics beside the hyperparameters that a logger writes before training, or when it begins."""
        if not self._merged:
            self._check()
            self._writer.flush()
            self._merged = hparams.merge(str(self._writer.get_logdir()), METRICS)

    def _layout(self, measurement: Measurement, tags: Iterable[str]) -> list[dict[str, Any]]:
        """Return the tab Custom Scalars if there are new layers or tags, and write an explanation of its charts.

        Some steps measure only some quantities, so tags add up.
        """
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING
        from tensorboard.plugins.custom_scalar import metadata

        layers, all_tags = self._laid_out
        all_tags = (all_tags if layers == measurement.layers else frozenset()) | frozenset(tags)
        if (measurement.layers, all_tags) == self._laid_out:
            return []
        self._laid_out = measurement.layers, all_tags
        prefixes = {key: (f"{group(key)}/", f"{group(log2_of(key))}/") for key in QUANTITIES}
        keys = [key for key in prefixes if any(tag.startswith(prefixes[key]) for tag in all_tags)]
        self._writer.add_text(QUESTIONS, questions_markdown(keys), measurement.step + self._offset)
        charts = layout(*self._laid_out).SerializeToString()
        value = {
            "tag": metadata.CONFIG_SUMMARY_TAG,
            "tensor": TensorProto(dtype=DT_STRING, string_val=[charts]),
            "metadata": metadata.create_summary_metadata(),
        }
        return [value]

    def _add_verdicts(self, measurement: Measurement) -> None:
        """Write the verdicts if the roots or the network's state have changed."""
        verdicts = root_keys(measurement), tally(measurement).state
        if self._reported is not None and (self._reported[1] == verdicts or not is_judged(measurement)):
            return
        text = verdict_markdown(measurement)
        if self._heatmap_every and not can_draw():
            text = f"{text}\n\n{NO_PICTURES}"
        self._writer.add_text(VERDICTS, text, measurement.step + self._offset)
        self._reported = measurement.step, verdicts

    def _pictures(self, measurement: Measurement) -> list[dict[str, Any]]:
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._last_pictured = measurement
        values = []
        for quantity in pictured():
            pixels = heatmap(self._history, quantity)
            if pixels is not None:
                height, width, _ = pixels.shape
                image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=_png(pixels))
                values.append({"tag": f"{HEATMAP}/{quantity}", "image": image})
        return values

    def _add_histograms(self, measurement: Measurement) -> None:
        """Add histograms of each panel's first quantity, and of quantities over their references, as powers of two."""
        columns = {}
        for panel in PANELS:
            rows = shown(panel, measurement.layers)
            key = panel.quantities[0]
            if key in measurement.values:
                columns[key] = measurement.values[key][rows]
            for key in panel.quantities:
                if key in measurement.bands and key in measurement.values:
                    ratios = measurement.values[key] / measurement.bands[key][:, 2]
                    columns[f"{key}/log2_over_reference"] = ratios[rows].log2()
        for name, values in columns.items():
            finite = values[torch.isfinite(values)]
            if len(finite):
                self._writer.add_histogram(f"{HISTOGRAM}/{name}", finite, measurement.step + self._offset)


def _png(pixels: Any) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    image = Image.fromarray(pixels).quantize(MAX_COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    image.save(file, format="PNG")
    return file.getvalue()
