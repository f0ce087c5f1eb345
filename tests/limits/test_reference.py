"""The reference line: what it holds, its files, and the dashed line on the page."""

from __future__ import annotations

import json
import math

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from spectral_monitor import SpectralProbe
from spectral_monitor.reporting import JSONLinesSink
from spectral_monitor.reporting.content.labels import quantity_title
from spectral_monitor.reporting.files.runs import run_file
from spectral_monitor.reporting.html.limit_lines import NAME, limit_sentences, limit_traces
from spectral_monitor.reporting.limit_run import read_limit, write_limit
from spectral_monitor.scaling import MUP, NTP, reference_run
from tests.one_step import training_step

STEPS, LR = 6, 0.3
KEYS = ["feature_change", "weight_natural", "alignment", "weight_norm"]


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, width, bias=False), nn.Linear(width, 2, bias=False))

    def forward(self, x, y):
        return (self.net(x) - y).square().sum(1).mean() / 2


def batches():
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(STEPS):
        x = torch.randn(16, 4, generator=generator)
        found.append((x, x[:, :2] - x[:, 2:]))
    return found


def line(**settings):
    settings = {"parametrization": MUP, "lr": LR, "steps": STEPS, "measured": range(1, STEPS + 1), **settings}
    return reference_run(Net, batches(), quantities=KEYS, **settings)


def training(width, sinks=()):
    """An ordinary training with the probe, of the same batches."""
    torch.manual_seed(1)
    module = Net(width)
    MUP.init_(module)
    optimizer = torch.optim.SGD(MUP.param_groups(module, lr=LR, optimizer="sgd"))
    probe = SpectralProbe(module, optimizer, every_n_steps=1, quantities=KEYS, mode="observe", sinks=sinks)
    for x, y in batches():
        with training_step(probe, optimizer):
            module(x, y).backward()
    return list(probe.measurements)


def test_the_line_is_what_wide_trainings_come_near():
    limit, apart = line(), []
    for width in (64, 1024, 16384):
        run = training(width)
        apart.append(
            max(
                abs(m.value(key, name) / there.value(key, name) - 1)
                for m, there in zip(run, limit, strict=True)
                for key in KEYS[:3]
                for name in ("net.0", "net.1")
                if there.value(key, name) > 0  # the readout's alignment with features is 0 at the start
            )
        )
    assert apart[0] > apart[1] > apart[2]
    assert apart[2] < 0.03
    assert all(math.isnan(m.value("weight_norm", "net.0")) for m in limit)
    # Outputs are 0 at the start, so that their first change has no ratio; all else has.
    missing = {(m.step, key, name) for m in limit for key in KEYS[:3] for name in ("net.0", "net.1")}
    missing = {some for some in missing if math.isnan(limit[some[0] - 1].value(*some[1:]))}
    assert missing == {(1, "feature_change", "net.1")}


def test_it_is_a_run_of_its_own(tmp_path):
    sink = JSONLinesSink(tmp_path / "spectral_monitor.jsonl")
    run, limit, taken = training(64, [sink]), line(), []

    class Taking:
        def write(self, measurement):
            taken.append(measurement.step)

        def close(self):
            taken.append("closed")

    place = write_limit(limit, tmp_path, [Taking()])
    assert taken == [*range(1, STEPS + 1), "closed"]
    # The training's file is still the one that commands read.
    assert run_file(tmp_path)[0] == tmp_path / "spectral_monitor.jsonl"
    read = read_limit(tmp_path / "spectral_monitor.jsonl")
    assert [m.value("alignment", "net.1") for m in read] == pytest.approx(
        [m.value("alignment", "net.1") for m in limit], rel=1e-5
    )
    events = EventAccumulator(str(place)).Reload()
    found = [event.value for event in events.Scalars("spectral_feature_change/net.0")]
    assert found == pytest.approx([m.value("feature_change", "net.0") for m in limit])
    assert "spectral_weight_norm/net.0" not in events.Tags()["scalars"]
    with pytest.raises(FileExistsError, match=r"already has a limit"):
        write_limit(limit, tmp_path)
    assert read_limit(tmp_path / "elsewhere") == []
    assert limit_sentences(run, read)


def test_the_sentence_is_of_the_farthest_layer():
    run, limit = training(256), line()
    said = limit_sentences(run, limit)
    assert len(said) == 3  # not of norms that go with the width
    for sentence, key in zip(sorted(said), sorted(KEYS[:3], key=quantity_title), strict=True):
        worst = max(abs(run[-1].value(key, n) / limit[-1].value(key, n) - 1) for n in ("net.0", "net.1"))
        what = f"At step {STEPS} the {quantity_title(key)} is within {math.ceil(100 * worst)} %"
        assert sentence == f"{what} of its limit of infinite width."
    assert limit_sentences(run[:-1], limit[-1:]) == []


def test_the_page_has_a_dashed_line_for_each_layer():
    pytest.importorskip("plotly")
    from spectral_monitor.reporting.html.report import report

    run, limit = training(64), line()
    (first, second) = limit_traces(limit, "feature_change", ("net.0", "net.1"))
    assert first["line"]["dash"] == "dash"
    assert first["x"] == list(range(1, STEPS + 1))
    assert second["y"] == pytest.approx([m.value("feature_change", "net.1") for m in limit[1:]], rel=1e-3)
    assert first["showlegend"]
    assert not second["showlegend"]
    assert limit_traces(limit, "weight_norm", ("net.0",)) == []
    page, plain = report(run, limit=limit), report(run)
    assert json.dumps(NAME) in page
    assert json.dumps(NAME) not in plain
    assert "is within" in page


def test_bad_input_is_named(tmp_path):
    with pytest.raises(ValueError, match="NTP has no feature-learning limit"):
        line(parametrization=NTP)
    with pytest.raises(ValueError, match="the limit cannot be followed: the loss is"):
        line(lr=1e30)
    with pytest.raises(ValueError, match="no measurements"):
        write_limit([], tmp_path)
    assert list(tmp_path.iterdir()) == []
