"""What the page says of a run besides its measurements, read from the run's folder."""

from __future__ import annotations

import pytest
import torch

from spectral_monitor import LayerInfo, Measurement
from spectral_monitor.reporting import JSONLinesSink
from spectral_monitor.reporting.files.run_facts import run_facts
from spectral_monitor.reporting.logged_run import read_run


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "version_3" / "spectral_monitor.jsonl"
    layers = (LayerInfo("head", "readout", 8, 8, (8, 8)),)
    sink = JSONLinesSink(path, {"model": "GPT", "optimizer": "AdamW"})
    sink.write(Measurement(5, layers, {"lr": torch.ones(1)}, {}))
    return path


def test_model_and_hyperparameters(file):
    (file.parent / "hparams.yaml").write_text("lr: 0.01\nnested:\n  a: 1\nwidth: 64\n")
    about = run_facts(file).about
    assert {key: about[key] for key in about if key != "date"} == {
        "model": "GPT",
        "optimizer": "AdamW",
        "run": "version_3",
        "lr": "0.01",
        "width": "64",
    }
    assert len(read_run(file)) == 1, "the file can still be read"


@pytest.mark.parametrize("line", ["[" * 2000, "[]", "{", ""], ids=["nest", "list", "cut", "empty"])
def test_a_first_line_that_is_none_says_nothing(file, line):
    file.write_text(line)
    assert set(run_facts(file).about) == {"date", "run"}


def test_the_loss_of_a_csv_logger(file):
    (file.parent / "metrics.csv").write_text("epoch,step,train_loss,val_loss\n0,0,2.5,\n0,1,,9\n0,1,2.25,\n")
    facts = run_facts(file)
    assert (facts.loss, list(facts.points)) == ("train_loss", [(0, 2.5), (1, 2.25)])


def test_the_loss_of_a_tensorboard_logger(file):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(file.parent)) as writer:
        for step, value in enumerate((2.5, 2.25)):
            writer.add_scalar("train_loss", value, step)
            writer.add_scalar("val_loss", 9.0, step)
    facts = run_facts(file)
    assert (facts.loss, list(facts.points)) == ("train_loss", [(0, 2.5), (1, 2.25)])


@pytest.mark.parametrize("name", ["metrics.csv", "events.out.tfevents.1"])
def test_files_of_other_tools_cost_no_page(name, file):
    (file.parent / name).write_bytes(b"\x00\xffnot ours")
    assert run_facts(file).loss == ""
