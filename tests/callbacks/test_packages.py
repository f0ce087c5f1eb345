"""A trainer of ``lightning.pytorch`` and one of ``pytorch_lightning``: the same numbers, files and checkpoints.

All other tests of the callbacks run for both as well: see tests/renamed.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from spectral_monitor.callbacks.lightning_packages import PACKAGES, is_instance, package_of
from spectral_monitor.reporting import read_measurements

ROOT = Path(__file__).parents[2]
NET = """
import json, sys, warnings
import torch

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    def training_step(self, batch, index):
        loss = self.net(batch).square().mean()
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "log_every_n_steps": 1}

def data():
    return torch.utils.data.DataLoader(torch.randn(32, 8, generator=torch.Generator().manual_seed(2)), 8)

def numbers(monitor):
    return [[m.step, {k: v for k, v in m.scalars().items() if "overhead" not in k}] for m in monitor.measurements]
"""
FIT = """
import PACKAGE as pl
from PACKAGE.loggers import CSVLogger, TensorBoardLogger
from spectral_monitor import SpectralMonitor
NET
loggers = [TensorBoardLogger("board"), CSVLogger("csv")]
monitor = SpectralMonitor(every_n_steps=1, drift_every=1)
trainer = pl.Trainer(max_epochs=1, callbacks=monitor, logger=loggers, **QUIET)
trainer.fit(Net(), data())
trainer.save_checkpoint("one.ckpt")
again = SpectralMonitor(every_n_steps=1, drift_every=1)
trainer = pl.Trainer(max_epochs=2, callbacks=[again], logger=loggers, **QUIET)
with warnings.catch_warnings():
    warnings.simplefilter("error", UserWarning)
    warnings.filterwarnings("ignore", module="(lightning|pytorch_lightning|torch)[.]")
    trainer.fit(Net(), data(), ckpt_path="one.ckpt")
found = {"packages": sorted({name.split(".")[0] for name in sys.modules} & {"lightning", "pytorch_lightning"})}
found |= {"first": numbers(monitor), "then": numbers(again), "sinks": sorted(trainer.callback_metrics)}
json.dump(found, open("found.json", "w"))
"""
EITHER_ORDER = """
from spectral_monitor import SpectralMonitor
early = SpectralMonitor(every_n_steps=1)
import lightning.pytorch
import PACKAGE as pl
NET
for monitor in (early, SpectralMonitor(every_n_steps=1)):
    assert isinstance(monitor, pl.Callback) and isinstance(monitor, lightning.pytorch.Callback)
    pl.Trainer(max_epochs=1, callbacks=monitor, logger=False, enable_checkpointing=False, **QUIET).fit(Net(), data())
    print("measured", [m.step for m in monitor.measurements])
"""
ALONE = """
import sys
sys.modules["lightning"] = None
from spectral_monitor import SpectralMonitor
import PACKAGE as pl
NET
monitor = SpectralMonitor(every_n_steps=1)
pl.Trainer(max_epochs=1, callbacks=monitor, logger=False, enable_checkpointing=False, **QUIET).fit(Net(), data())
print("measured", [m.step for m in monitor.measurements])
"""
CLI = """
import PACKAGE as pl
from PACKAGE.cli import LightningCLI
NET
import spectral_monitor
class Data(pl.LightningDataModule):
    train_dataloader = staticmethod(data)
LightningCLI(Net, Data)
"""
OTHERS_CHECKPOINT = """
import PACKAGE as pl
from spectral_monitor import SpectralMonitor
NET
monitor = SpectralMonitor(every_n_steps=1, drift_every=1)
pl.Trainer(max_epochs=2, callbacks=monitor, logger=False, **QUIET).fit(Net(), data(), ckpt_path=sys.argv[1])
json.dump(numbers(monitor), open("then.json", "w"))
"""


def run(folder, program, package, *arguments):
    """Run a program of one package in a process of its own."""
    text = program.replace("NET", NET, 1).replace("PACKAGE", package)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", text, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def fits(tmp_path_factory):
    """Of each package: the folder of a run that was resumed, what it measured, and what it said."""

    @cache
    def fit(package):
        folder = tmp_path_factory.mktemp(package)
        said = run(folder, FIT, package)
        return SimpleNamespace(folder=folder, said=said, **json.loads((folder / "found.json").read_text()))

    return fit


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("package", PACKAGES)
def test_only_the_package_in_use_is_imported(fits, package):
    assert fits(package).packages == [package.partition(".")[0]]


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_it_measures_logs_and_resumes(fits, package):
    found = fits(package)
    assert [step for step, _ in found.first] == [1, 2, 3, 4]
    assert [step for step, _ in found.then] == [5, 6, 7, 8]
    assert "spectral/summary/violations" in found.sinks
    assert list(found.folder.rglob("events.out.tfevents.*"))
    assert "spectral_update_ratio/" in next(found.folder.rglob("metrics.csv")).read_text()
    assert list(found.folder.rglob("spectral_monitor.jsonl"))
    assert "measuring took" in found.said


@pytest.mark.slow
def test_the_numbers_are_the_same(fits):
    ours, theirs = map(fits, PACKAGES)
    assert (ours.first, ours.then) == (theirs.first, theirs.then)


@pytest.mark.slow
@pytest.mark.parametrize(("saves", "resumes"), [PACKAGES, pytest.param(*PACKAGES[::-1], marks=pytest.mark.exhaustive)])
def test_a_checkpoint_of_the_other_package(fits, tmp_path, saves, resumes):
    saved = fits(saves)
    run(tmp_path, OTHERS_CHECKPOINT, resumes, saved.folder / "one.ckpt")
    assert json.loads((tmp_path / "then.json").read_text()) == saved.then


@pytest.mark.slow
def test_the_monitor_may_be_made_before_the_package_is_imported(tmp_path):
    assert run(tmp_path, EITHER_ORDER, PACKAGES[1]).count("measured [1, 2, 3, 4]") == 2


@pytest.mark.slow
def test_the_monitor_may_be_imported_first_where_the_other_package_is_not_installed(tmp_path):
    assert "measured [1, 2, 3, 4]" in run(tmp_path, ALONE, PACKAGES[1])


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_the_command_line(tmp_path, package):
    callback = {"class_path": "spectral_monitor.SpectralMonitor", "init_args": {"every_n_steps": 2}}
    logger = {"class_path": f"{package}.loggers.CSVLogger", "init_args": {"save_dir": "."}}
    trainer = {"max_epochs": 1, "callbacks": [callback], "logger": logger, "accelerator": "cpu"}
    (tmp_path / "config.yaml").write_text(json.dumps({"trainer": trainer}))
    run(tmp_path, CLI, package, "fit", "--config", "config.yaml")
    (file,) = tmp_path.rglob("spectral_monitor.jsonl")
    assert [measurement.step for measurement in read_measurements(file)] == [2, 4]


def test_what_is_of_neither_package():
    with pytest.raises(TypeError, match=r"SimpleNamespace is not a Trainer of lightning.pytorch or pytorch_lightning"):
        package_of(SimpleNamespace())
    assert not is_instance(SimpleNamespace(), "loggers.CSVLogger")
    with pytest.raises(AttributeError, match="NoLogger"):
        is_instance(None, "loggers.NoLogger")
