"""What is in the event files: numbers, pictures, texts; and what happens when they cannot be written."""

from __future__ import annotations

import io
import math
import shutil
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.tensorboard import SummaryWriter

from spectral_monitor.messages import SpectralMonitorWarning
from spectral_monitor.reporting import sinks as sinks_module
from spectral_monitor.reporting.content.essentials import essentials
from spectral_monitor.reporting.content.history import History
from spectral_monitor.reporting.content.panels import PANELS, pictured
from spectral_monitor.reporting.heatmap import heatmap
from spectral_monitor.reporting.sinks import Sinks
from spectral_monitor.reporting.tensorboard_sink import sink as module
from spectral_monitor.reporting.tensorboard_sink.sink import TensorBoardSink
from tests.reporting.board import NAMES, ROLES, events, images, layouts, measurement, read, scalars, texts


@pytest.fixture
def writer(tmp_path):
    with SummaryWriter(str(tmp_path / "run")) as writer:
        yield writer


@pytest.mark.parametrize("log", ["essential", "all", ["contribution/*"]])
def test_every_number_is_there_under_its_key_at_its_step(writer, log):
    sink = TensorBoardSink(writer, log=log)
    told = [measurement(step) for step in (10, 20, 35)]
    told[1].values["alignment"][2] = math.nan
    told[2].values["alignment"][3] = math.inf
    for one in told:
        sink.write(one)
    expected = {(one.step, tag): np.float32(value) for one in told for tag, value in essentials(one, log).items()}
    found = scalars(writer)
    assert found == expected
    assert ((10, f"spectral/lr/{NAMES[0]}") in found) == (log == "all")
    assert ((10, f"spectral_contribution/{NAMES[0]}") in found) == isinstance(log, list)
    assert all(math.isfinite(value) for value in found.values())


def test_the_numbers_of_a_step_are_one_event(writer):
    sink = TensorBoardSink(writer, heatmap_every=0)
    for step in (10, 20):
        sink.write(measurement(step))
    sizes = [len(event.summary.value) for event in events(writer)]
    assert sum(size > 50 for size in sizes) == 2
    assert len(sizes) == 1 + 2 + 2  # the version, two steps, the first texts: verdicts, and what charts show


def test_nothing_else_of_the_writer_is_touched(writer):
    writer.add_scalars("mine", {"a": 1.0}, 1)
    before = dict(writer.all_writers)
    sink = TensorBoardSink(writer)
    sink.write(measurement())
    sink.close()
    assert writer.all_writers == before
    writer.add_scalar("mine/loss", 0.5, 3)
    assert scalars(writer)[3, "mine/loss"] == 0.5


def test_pictures_at_every_third_measurement_and_at_the_end(writer):
    sink, history = TensorBoardSink(writer, heatmap_every=3), History()
    expected = {}
    for step in range(10, 80, 10):
        told = measurement(step, outside=("tokens",) if step > 40 else ())
        sink.write(told)
        history.add(told)
        expected[step] = {quantity: heatmap(history, quantity) for quantity in pictured()}
    sink.close()
    found = images(writer)
    assert set(found) == set(pictured())
    for quantity in pictured():
        assert [step for step, _ in found[quantity]] == [30, 60, 70]
        for step, encoded in found[quantity]:
            pixels = np.asarray(Image.open(io.BytesIO(encoded)).convert("RGB"))
            assert (pixels == expected[step][quantity]).all()


def test_the_last_picture_is_not_drawn_twice(writer):
    sink = TensorBoardSink(writer, heatmap_every=2)
    sink.write(measurement(10))
    sink.write(measurement(20))
    sink.close()
    assert [step for step, _ in images(writer)["bfa_cos"]] == [20]


def test_no_pictures_on_request(writer):
    sink = TensorBoardSink(writer, heatmap_every=0)
    sink.write(measurement())
    sink.close()
    assert images(writer) == {}
    assert module.NO_PICTURES not in texts(writer)[0][1]


def test_without_matplotlib_the_text_says_so(writer, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    sink = TensorBoardSink(writer, heatmap_every=1)
    sink.write(measurement())
    sink.close()
    assert images(writer) == {}
    ((_, text),) = texts(writer)
    assert module.NO_PICTURES in text
    assert (10, "spectral_update_ratio/tokens") in scalars(writer)


def test_a_picture_that_fails_does_not_take_the_numbers_with_it(writer, monkeypatch):
    def fail(history, quantity):
        raise RuntimeError("no font")

    monkeypatch.setattr(module, "heatmap", fail)
    sink = TensorBoardSink(writer, heatmap_every=1)
    with pytest.raises(RuntimeError, match="no font"):
        sink.write(measurement())
    found = scalars(writer)
    assert {(10, tag) for tag in essentials(measurement())} <= set(found)


def test_verdicts_are_told_at_first_when_they_change_and_at_the_end(writer):
    sink = TensorBoardSink(writer)
    for step, outside in enumerate([(), (), ("tokens",), ("tokens",), ("tokens", "blocks.0.mlp"), (), ()], start=1):
        sink.write(measurement(step, outside=outside, banded=()))
    sink.close()
    found = dict(texts(writer))
    assert list(found) == [1, 3, 5, 6, 7]
    assert found[1].startswith("**Step 1: all 6 layers healthy**")
    assert found[3].startswith("**Step 3: 1 of 6 layers off: tokens; 5 healthy**")
    assert "| tokens | update size | 9 | 0.06 .. 4 | 20 steps | divide it by 18 |" in found[3]
    assert found[5].startswith("**Step 5: 2 of 6 layers off: tokens, blocks.0.mlp; 4 healthy**")
    assert [found[step].startswith(f"**Step {step}: all 6 layers healthy**") for step in (6, 7)] == [True, True]


def test_the_last_verdicts_are_not_told_twice(writer):
    sink = TensorBoardSink(writer)
    sink.write(measurement(10))
    sink.close()
    assert len(texts(writer)) == 1


def test_histograms_are_of_layers_and_of_how_far_out_they_are(writer):
    sink = TensorBoardSink(writer, histograms=True)
    told = measurement(10, banded=("update_natural", "weight_natural"))
    told.values["alignment"][:] = math.nan
    told.bands["weight_natural"][0] = math.nan
    sink.write(told)
    found = read(writer)
    shown = [i for i, role in enumerate(ROLES) if role != "vector"]
    expected = {panel.quantities[0]: told.values[panel.quantities[0]][shown] for panel in PANELS}
    del expected["alignment"]
    for key, some in (("update_natural", shown), ("weight_natural", shown[1:])):
        expected[f"{key}/log2_over_reference"] = torch.log2(told.values[key][some] / 0.3)
    tags = {f"spectral/histogram/{name}": values for name, values in expected.items()}
    assert set(found.Tags()["histograms"]) == set(tags)
    for tag, values in tags.items():
        (event,) = found.Histograms(tag)
        summary = event.histogram_value
        assert (event.step, summary.num) == (10, len(values))
        assert [summary.min, summary.max, summary.sum] == pytest.approx(
            [values.min().item(), values.max().item(), values.sum().item()], rel=1e-5
        )


def test_no_histograms_unless_asked_for(writer):
    TensorBoardSink(writer).write(measurement())
    assert read(writer).Tags()["histograms"] == []


def test_a_full_disk_is_left_alone(writer, monkeypatch):
    sink = TensorBoardSink(writer)
    writer.flush()
    size = sum(event.ByteSize() for event in events(writer))
    monkeypatch.setattr(sinks_module, "MIN_FREE_BYTES", 1 << 80)
    with pytest.raises(OSError, match="no space left"):
        sink.write(measurement(10))
    TensorBoardSink(writer)  # training may start all the same
    monkeypatch.undo()
    assert sum(event.ByteSize() for event in events(writer)) == size
    sink.write(measurement(20))
    sink.close()
    found = {step for step, _ in scalars(writer)}
    assert found == {20}
    assert [step for step, _ in texts(writer)] == [20]
    assert [step for step, _ in layouts(writer)] == [20]


def test_a_folder_that_is_gone_and_a_writer_that_is_closed(writer):
    sink = TensorBoardSink(writer)
    sink.write(measurement(10))
    writer.flush()
    shutil.rmtree(writer.get_logdir())
    with pytest.raises(FileNotFoundError):
        sink.write(measurement(20))
    writer.close()
    with pytest.raises(OSError, match="closed"):
        sink.write(measurement(30))
    assert writer.all_writers is None  # it was not opened again


def test_what_goes_wrong_is_one_warning_and_the_writer_goes_on(writer, monkeypatch):
    told = Sinks([TensorBoardSink(writer)])
    monkeypatch.setattr(sinks_module, "MIN_FREE_BYTES", 1 << 80)
    with pytest.warns(SpectralMonitorWarning, match="TensorBoardSink did not take the measurement"):
        told.write(measurement(10))
    told.write(measurement(20))  # another warning would be an error
    writer.add_scalar("mine", 1.0, 30)
    assert scalars(writer) == {(30, "mine"): 1.0}


def test_a_writer_that_was_closed_after_an_earlier_fit_begins_another_file(writer):
    TensorBoardSink(writer).write(measurement(10))
    writer.close()
    TensorBoardSink(writer).write(measurement(20))
    assert {step for step, _ in scalars(writer)} == {10, 20}


def test_after_closing_another_run_begins_anew(writer):
    sink = TensorBoardSink(writer, heatmap_every=2)
    for step in (10, 20):
        sink.write(measurement(step))
        sink.close()
        sink.close()  # once more does no harm
    assert [step for step, _ in layouts(writer)] == [10, 20]
    assert [step for step, _ in texts(writer)] == [10, 20]
    assert [step for step, _ in images(writer)["bfa_cos"]] == [10, 20]


def test_a_folder_that_is_none_of_the_system():
    fsspec = pytest.importorskip("fsspec")
    with SummaryWriter("memory://spectral/run") as writer:
        sink = TensorBoardSink(writer)
        sink.write(measurement())
        sink.close()
        writer.flush()
        (path,) = fsspec.filesystem("memory").glob("/spectral/run/*")
        assert fsspec.filesystem("memory").size(path) > 1000


def test_steps_may_be_counted_from_zero(writer):
    sink = TensorBoardSink(writer, heatmap_every=1, histograms=True, offset=-1)
    sink.write(measurement(10))
    assert {step for step, _ in scalars(writer)} == {9}
    assert [step for step, _ in layouts(writer)] == [step for step, _ in texts(writer)] == [9]
    assert [step for step, _ in images(writer)["bfa_cos"]] == [9]
    assert "Step 10" in texts(writer)[0][1], "what people read are steps taken"
