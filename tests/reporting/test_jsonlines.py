"""Measurements written and read back."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from io import FileIO
from pathlib import Path

import pytest
import torch

from spectral_monitor import LayerInfo, Measurement, SpectralProbe, Verdict
from spectral_monitor.condition.verdict import Remedy
from spectral_monitor.measurement import LayerState
from spectral_monitor.reporting import JSONLinesSink, read_measurements
from tests.one_step import training_step

NAMES = ("plain", 'quoted "name"', "new\nline", "</script><img src=x onerror=alert(1)>", "Ünïcode.層")
LAYERS = tuple(LayerInfo(name, "operator", 8, 4, (8, 4), 2, "Shard(0)") for name in NAMES)


def measurement(step=5, layers=LAYERS):
    values = torch.tensor([1.5, math.nan, math.inf, -math.inf, 1e-30])[: len(layers)]
    names, infinite = tuple(info.name for info in layers), (0.0, math.inf)
    verdict = Verdict(names[0], "update_ratio", 0.7, infinite, 0.7, 3, 2, "exploding", "too large", names[:2], "")
    remedies = Remedy("set_lr", names[:2], 0.001), Remedy("check")  # whose value is NaN
    roots = [replace(verdict, remedy=remedy, consequences=names[1:]) for remedy in remedies]
    follower = replace(verdict, layer=names[1], layers=names[1:2], root=names[0])
    states = {name: LayerState("off", "exploding") for name in names[:2]}
    states |= {name: LayerState("not judged", "frozen") for name in names[2:4]}
    states |= {name: LayerState("healthy") for name in names[4:]}
    return Measurement(
        step=step,
        layers=layers,
        values={"weight_norm": values, "lr": torch.full((len(layers),), 0.1)},
        summary={"violations": 1.0, "loss_change": math.nan, "worst_layer_ratio": math.inf},
        verdicts=(*roots, follower),
        states=states,
        reasons={"weight_norm/plain": "because"},
        flags={layers[0].name: 1.0},
        bands={"lr": torch.tensor([[0.0, math.inf, math.nan]] * len(layers))},
    )


def assert_same(found, wanted):
    assert (found.step, found.layers, found.reasons, found.flags) == (
        *(wanted.step, wanted.layers, wanted.reasons, wanted.flags),
    )
    assert list(found.states.items()) == list(wanted.states.items())
    assert [str(verdict) for verdict in found.verdicts] == [str(verdict) for verdict in wanted.verdicts]
    rows = [[verdict.to_row() for verdict in of.verdicts] for of in (found, wanted)]
    assert rows[0] == rows[1], "in which what is NaN is None"
    assert [verdict.remedy and type(verdict.remedy.layers) for verdict in found.verdicts] == [tuple, tuple, None]
    for ours, theirs in ((found.values, wanted.values), (found.bands, wanted.bands)):
        assert ours.keys() == theirs.keys()
        for key in ours:
            torch.testing.assert_close(ours[key], theirs[key], rtol=1e-5, atol=0, equal_nan=True)
    assert found.summary == pytest.approx(wanted.summary, nan_ok=True)


def test_what_is_read_is_what_was_written(tmp_path):
    sink = JSONLinesSink(tmp_path / "a" / "run.jsonl")
    written = [measurement(5), measurement(10)]
    for item in written:
        sink.write(item)
    found = list(read_measurements(sink.path))
    assert len(found) == 2
    for ours, theirs in zip(found, written, strict=True):
        assert_same(ours, theirs)


def test_every_line_is_strict_json_and_layers_are_there_once(tmp_path):
    sink = JSONLinesSink(tmp_path / "run.jsonl")
    for step in (1, 2, 3):
        sink.write(measurement(step))

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    rows = [json.loads(line, parse_constant=refuse) for line in sink.path.read_text().splitlines()]
    assert ["layers" in row for row in rows] == [True, False, False, False]
    assert [layer["name"] for layer in rows[0]["layers"]] == list(NAMES)


def test_other_layers_are_described_anew(tmp_path):
    sink = JSONLinesSink(tmp_path / "run.jsonl")
    wanted = [measurement(1), measurement(2, LAYERS[:2]), measurement(3, LAYERS[:2]), measurement(4)]
    for item in wanted:
        sink.write(item)
    for found, theirs in zip(read_measurements(sink.path), wanted, strict=True):
        assert_same(found, theirs)


def test_a_later_run_is_appended(tmp_path):
    for step in (1, 2):
        sink = JSONLinesSink(tmp_path / "run.jsonl")
        sink.write(measurement(step))
        sink.close()
    assert [m.step for m in read_measurements(tmp_path / "run.jsonl")] == [1, 2]


def test_a_file_that_was_taken_away_begins_with_the_layers(tmp_path):
    sink = JSONLinesSink(tmp_path / "run.jsonl")
    sink.write(measurement(1))
    sink.path.unlink()
    sink.write(measurement(2))
    (found,) = read_measurements(sink.path)
    assert_same(found, measurement(2))


@pytest.mark.parametrize("cut", [1, 40, 200])
def test_an_incomplete_last_line_is_left_out(tmp_path, cut):
    sink = JSONLinesSink(tmp_path / "run.jsonl")
    sink.write(measurement(1))
    sink.write(measurement(2))
    text = sink.path.read_text()
    sink.path.write_text(text[:-cut])
    assert [m.step for m in read_measurements(sink.path)] == ([1, 2] if cut == 1 else [1])


def test_reasons_are_written_when_they_change(tmp_path):
    sink = JSONLinesSink(tmp_path / "run.jsonl")
    several = [{"a/*": "one"}, {"a/*": "one"}, {"a/*": "two", "b/*": "three"}, {}, {"a/*": "one"}]
    for step, reasons in enumerate(several):
        sink.write(replace(measurement(step), reasons=reasons))
    rows = [json.loads(line) for line in sink.path.read_text().splitlines()[1:]]
    assert [row["reasons"] for row in rows] == [
        {"a/*": "one"},
        {},
        {"a/*": "two", "b/*": "three"},
        {"a/*": None, "b/*": None},
        {"a/*": "one"},
    ]
    assert [m.reasons for m in read_measurements(sink.path)] == several


@pytest.mark.parametrize("cut", [1, 40, 5000])
def test_a_run_goes_on_after_one_that_was_killed_while_it_wrote(tmp_path, cut):
    sink = JSONLinesSink(tmp_path / "run.jsonl")
    sink.write(measurement(1))
    sink.write(measurement(2))
    sink.path.write_bytes(sink.path.read_bytes()[:-cut])
    JSONLinesSink(sink.path).write(measurement(3))
    steps = [m.step for m in read_measurements(sink.path)]
    assert steps == {1: [1, 2, 3], 40: [1, 3], 5000: [3]}[cut]


def test_a_line_that_could_not_be_written_in_full_is_left_out(tmp_path, monkeypatch):
    sink = JSONLinesSink(tmp_path / "run.jsonl")
    sink.write(measurement(1))

    class Full(FileIO):
        def write(self, data):
            super().write(data[: len(data) // 2])
            raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda path, mode: Full(path, "ab+"))
        with pytest.raises(OSError, match="no space left"):
            sink.write(measurement(2))
    sink.write(measurement(3))
    assert [m.step for m in read_measurements(sink.path)] == [1, 3]


@pytest.mark.parametrize(
    "text",
    [
        "hello\nworld\n",
        '{"step": 1}\n{"step": 2}\n',
        '[1, 2]\n[3]\n',
        '{"format": "other", "version": 1, "layers": []}\n\n',
        '{"format": "spectral_monitor.measurements", "version": 99, "layers": []}\n\n',
        '{"format": "spectral_monitor.measurements", "version": 1, "layers": []}\n\n',
        '{"format": "spectral_monitor.measurements", "version": 2, "layers": [{"name": 1}]}\n\n',
    ],
)  # fmt: skip
def test_a_file_that_is_not_ours_is_refused(tmp_path, text):
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"run.jsonl', line 1: not written by spectral_monitor"):
        list(read_measurements(path))


def test_a_broken_line_in_the_middle_is_refused(tmp_path):
    sink = JSONLinesSink(tmp_path / "run.jsonl")
    for step in (1, 2, 3):
        sink.write(measurement(step))
    lines = sink.path.read_text().splitlines()
    lines[2] = lines[2][:50]
    sink.path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match="line 3: not written by spectral_monitor"):
        list(read_measurements(sink.path))


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(IsADirectoryError, match="is a folder"):
        JSONLinesSink(tmp_path)


def test_a_probe_feeds_sinks(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    closed = []

    class Closing(JSONLinesSink):
        def close(self):
            closed.append(True)

    probe = SpectralProbe(model, optimizer, every_n_steps=2, sinks=[Closing(tmp_path / "run.jsonl")])
    for _ in range(4):
        with training_step(probe, optimizer):
            model(torch.randn(16, 4)).square().mean().backward()
    assert not closed
    probe.close()
    assert closed
    for found, measured in zip(read_measurements(tmp_path / "run.jsonl"), probe.measurements, strict=True):
        assert found.scalars() == pytest.approx(measured.scalars(), rel=1e-5)
        assert found.table() == measured.table()
