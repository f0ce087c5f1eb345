"""Measurements to write with TensorBoard, and what was written, read back with TensorBoard's own reader."""

from __future__ import annotations

from pathlib import Path

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

from spectral_monitor import LayerInfo, Measurement, Verdict
from spectral_monitor.measurement import LayerState
from spectral_monitor.quantities import QUANTITIES
from spectral_monitor.reporting.content.panels import PANELS

NAMES = ("tokens", "blocks.0.w+q", "blocks.0.mlp", "blocks.1.w+q", "blocks.1.mlp", "blocks.0.mlp.bias", "a (b)|c/d")
ROLES = ("embedding", *["operator"] * 4, "vector", "readout")
SUMMARY = {key: 0.5 for panel in PANELS if not panel.by_name for key in panel.summaries}


def layers(names=NAMES, roles=ROLES):
    return tuple(LayerInfo(name, role, 64, 64, (64, 64)) for name, role in zip(names, roles, strict=True))


def operators(names):
    return layers(names, ["operator"] * len(names))


def verdict(layer):
    return Verdict(layer, "update_natural", 9.04, (0.06, 4.0), 18.0, 20, 7, "lr_too_large", "divide it by 18")


def measurement(step=10, of=None, keys=tuple(QUANTITIES), outside=(), banded=("update_natural",)):
    of = layers() if of is None else of
    generator = torch.Generator().manual_seed(step)
    values = {key: torch.rand(len(of), generator=generator) + 0.01 for key in keys}
    bands = {key: torch.tensor([[0.1, 0.9, 0.3]] * len(of)) for key in banded}
    summary = {**SUMMARY, "violations": float(len(outside))}
    states = {info.name: LayerState("healthy") for info in of if info.is_matrix}
    return Measurement(step, of, values, summary, tuple(map(verdict, outside)), bands=bands, states=states)


def read(writer):
    writer.flush()
    everything = {"scalars": 0, "tensors": 0, "images": 0}
    return EventAccumulator(str(writer.get_logdir()), everything).Reload()


def events(writer):
    """Of the writer's own file."""
    writer.flush()
    (path,) = (path for path in Path(writer.get_logdir()).glob("*tfevents*") if "spectral_monitor" not in path.name)
    return list(EventFileLoader(str(path)).Load())


def scalars(writer):
    found = read(writer)
    return {(event.step, tag): event.value for tag in found.Tags()["scalars"] for event in found.Scalars(tag)}


def images(writer):
    found = read(writer)
    return {
        tag.removeprefix("spectral/heatmap/"): [(e.step, e.encoded_image_string) for e in found.Images(tag)]
        for tag in found.Tags()["images"]
    }


def texts(writer):
    tag = "spectral/verdicts/text_summary"
    return [(e.step, e.tensor_proto.string_val[0].decode()) for e in read(writer).Tensors(tag)]


def layouts(writer):
    tensors = read(writer).Tensors("custom_scalars__config__")
    return [(e.step, Layout.FromString(e.tensor_proto.string_val[0])) for e in tensors]
