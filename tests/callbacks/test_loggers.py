"""Loggers of all kinds, the run's own file, and what happens when something cannot be written."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import fsspec
import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CometLogger, CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger

from spectral_monitor import SpectralLRCorrector, SpectralMonitor, SpectralMonitorWarning
from spectral_monitor.callbacks import loggers as logs
from spectral_monitor.reporting import JSONLinesSink, read_measurements, sinks
from spectral_monitor.reporting.content.essentials import essentials
from tests.callbacks.quickfit import fit, recording

FILE = "spectral_monitor.jsonl"


def steps(path):
    return [measurement.step for measurement in read_measurements(path)]


@pytest.mark.parametrize("logger", [TensorBoardLogger, CSVLogger])
def test_the_runs_file_is_in_the_loggers_folder(tmp_path, logger):
    monitor = SpectralMonitor(every_n_steps=2)
    trainer = fit(monitor, logger=logger(tmp_path))
    read = list(read_measurements(Path(trainer.logger.log_dir) / FILE))
    assert len(read) == len(monitor.measurements) == 3
    for ours, theirs in zip(read, monitor.measurements, strict=True):
        assert ours.scalars() == pytest.approx(theirs.scalars(), rel=1e-5)
        assert (ours.step, ours.layers, ours.reasons) == (theirs.step, theirs.layers, theirs.reasons)


def test_there_is_one_whatever_the_number_of_loggers(tmp_path):
    fit(SpectralMonitor(every_n_steps=2), logger=[recording(), CSVLogger(tmp_path / "a"), CSVLogger(tmp_path / "b")])
    (found,) = tmp_path.rglob(FILE)
    assert steps(found) == [2, 4, 6]
    assert found.is_relative_to(tmp_path / "a")


@pytest.mark.slow
def test_it_is_beside_the_checkpoints_of_a_wandb_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(save_dir=tmp_path, project="p", offline=True)
    fit(SpectralMonitor(every_n_steps=2), logger=logger, enable_checkpointing=True)
    logger.experiment.finish()
    (found,) = tmp_path.rglob(FILE)
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    assert found.parent == checkpoint.parents[1]


def test_nothing_of_another_machine_becomes_a_folder_of_this_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logger = recording()
    monkeypatch.setattr(type(logger), "save_dir", "memory://logs")
    fit(SpectralMonitor(every_n_steps=2), logger=logger)
    assert len(logger.spectral) == 3
    assert list(tmp_path.iterdir()) == []


def test_csv_on_another_machine(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monitor, logger = SpectralMonitor(every_n_steps=2), CSVLogger("memory://logs")
    fit(monitor, logger=logger)
    with fsspec.open(f"{logger.log_dir}/metrics.csv", "r") as file:
        assert "spectral_update_ratio/" in file.readline()
    assert list(tmp_path.iterdir()) == []


def test_no_logger_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fit(SpectralMonitor(every_n_steps=2), logger=False)
    assert list(tmp_path.rglob("*")) == []


def test_mlflow(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monitor = SpectralMonitor(every_n_steps=2)
    logger = MLFlowLogger("e", tracking_uri=f"file:{tmp_path}")
    fit(monitor, logger=logger)
    for key, value in essentials(monitor.latest).items():
        points = logger.experiment.get_metric_history(logger.run_id, key)
        assert points[-1].step == 5
        assert points[-1].value == pytest.approx(value)
    (found,) = tmp_path.rglob(FILE)
    assert steps(found) == [2, 4, 6]
    (page,) = tmp_path.rglob("artifacts/spectral_monitor.html")
    assert "step 6" in page.read_text()


class Experiment:
    """What Comet gives a logger."""

    def __init__(self):
        self.assets, self.metrics, self.id = {}, [], "comet"

    def log_asset(self, path, file_name, copy_to_tmp):
        assert copy_to_tmp
        self.assets[file_name] = Path(path).read_text()

    def log(self, step, metrics):
        self.metrics.append((step, metrics))


def test_comet(monkeypatch):
    """By a stand-in for its package, which is not installed."""
    experiment = Experiment()
    monkeypatch.setattr(CometLogger, "__init__", lambda self: setattr(self, "_experiment", experiment))
    monkeypatch.setattr(CometLogger, "experiment", property(lambda self: experiment))
    for name in ("name", "version", "save_dir"):
        monkeypatch.setattr(CometLogger, name, None)
    monkeypatch.setattr(
        CometLogger, "log_metrics", lambda self, metrics, step: experiment.metrics.append((step, metrics))
    )
    for name in ("log_hyperparams", "log_graph", "finalize"):
        monkeypatch.setattr(CometLogger, name, lambda self, *args, **kwargs: None)
    monitor = SpectralMonitor(every_n_steps=2)
    fit(monitor, logger=CometLogger())
    ours = [(step, metrics) for step, metrics in experiment.metrics if "spectral/summary/violations" in metrics]
    assert ours == [(m.step - 1, essentials(m)) for m in monitor.measurements]
    assert "step 6" in experiment.assets["spectral_monitor.html"]


@pytest.mark.parametrize("make", [SpectralMonitor, SpectralLRCorrector])
def test_sinks_of_ones_own(tmp_path, make):
    path = tmp_path / "deep" / "mine.jsonl"
    monitor = make(every_n_steps=2, sinks=[JSONLinesSink(path)])
    fit(monitor, logger=recording())
    assert steps(path) == [m.step for m in monitor.measurements]


class Breaking:
    def __init__(self, where):
        self.where, self.steps = where, []

    def write(self, measurement):
        if self.where == "write":
            raise OSError("no space")
        self.steps.append(measurement.step)

    def close(self):
        if self.where == "close":
            raise ValueError("already closed")


@pytest.mark.parametrize(
    ("where", "said"),
    [("write", r"Breaking did not take the measurement \(OSError"), ("close", r"Breaking was not closed \(ValueError")],
)
def test_a_sink_that_raises_costs_one_warning(where, said):
    broken, whole, logger = Breaking(where), Breaking(""), recording()
    with pytest.warns(SpectralMonitorWarning, match=said) as caught:
        trainer = fit(SpectralMonitor(every_n_steps=1, sinks=[broken, whole]), logger=logger)
    assert len([w for w in caught if w.category is SpectralMonitorWarning]) == 1
    assert trainer.global_step == 6
    assert whole.steps == [step for step, _ in logger.spectral] == [1, 2, 3, 4, 5, 6]


def test_a_logger_that_cannot_even_begin_costs_a_warning(monkeypatch):
    def refuse(self, logger):
        raise RuntimeError("no connection")

    monkeypatch.setattr(logs.SinkManager, "_sink", refuse)
    sink = Breaking("")
    with pytest.warns(SpectralMonitorWarning, match="RecordingLogger gets no measurements .*no connection"):
        fit(SpectralMonitor(every_n_steps=2, sinks=[sink]), logger=recording())
    assert sink.steps == [2, 4, 6]


class Remove(pl.Callback):
    """Takes away what has been written, in the middle of training."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 3:
            shutil.rmtree(self.folder)


@pytest.mark.parametrize("logger", [TensorBoardLogger, CSVLogger])
@pytest.mark.filterwarnings("ignore::spectral_monitor.SpectralMonitorWarning")
def test_a_deleted_folder_does_not_stop_the_run(tmp_path, logger):
    sink = Breaking("")
    monitor = SpectralMonitor(every_n_steps=1, sinks=[sink])
    trainer = fit(
        monitor, logger=logger(tmp_path / "logs"), callbacks=[Remove(tmp_path / "logs")], log_every_n_steps=50
    )
    assert trainer.global_step == 6
    assert sink.steps == [1, 2, 3, 4, 5, 6]
    (file,) = (tmp_path / "logs").rglob(FILE)
    assert steps(file) == [3, 4, 5, 6], "it is made anew"


FULL = """
import sys, warnings
from pathlib import Path
import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
import torch
from spectral_monitor import SpectralMonitor, SpectralMonitorWarning

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    def training_step(self, batch, index):
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Fill(pl.Callback):
    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 3:
            with open(folder / "ballast", "wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(4096))
                except OSError as error:
                    print("full:", error.strerror)

folder, kind = Path(sys.argv[1]), sys.argv[2]
logger = {"csv": CSVLogger, "tensorboard": TensorBoardLogger}[kind](folder)
monitor = SpectralMonitor(every_n_steps=1)
callbacks = [Fill(), monitor] if len(sys.argv) < 4 else [Fill()]
quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = pl.Trainer(max_epochs=1, accelerator="cpu", logger=logger, callbacks=callbacks, log_every_n_steps=50, **quiet)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    try:
        trainer.fit(Net(), torch.utils.data.DataLoader(torch.randn(64, 8), 8))
    except OSError as error:
        print("stopped:", error)
for w in caught:
    if w.category is SpectralMonitorWarning:
        print("warned:", w.message)
print("steps:", trainer.global_step, "measured:", len(monitor.measurements))
"""


def on_a_small_disk(tmp_path, *arguments):
    """Output of the script above, with a folder of 16 MiB that only it sees."""
    folder = tmp_path / "disk"
    folder.mkdir()
    script = tmp_path / "full.py"
    script.write_text(FULL)
    mount = f"mount -t tmpfs -o size=16m tmpfs {folder}"
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "sh", "-c", mount], check=False).returncode:
        pytest.skip("no small disk can be mounted here (unshare -rm, tmpfs)")
    command = f'{mount} && exec "$0" "$@"'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", command, sys.executable, str(script), str(folder), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensorboard", "csv"])
def test_a_full_disk_costs_a_warning(tmp_path, kind):
    said = on_a_small_disk(tmp_path, kind)
    assert "full: No space left on device" in said
    assert re.search("warned: .* did not take the measurement .*no space left to write measurements", said)
    assert "stopped" not in said
    assert "steps: 8 measured: 8" in said


def test_a_disk_that_is_nearly_full_is_left_alone(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(sinks.shutil, "disk_usage", lambda folder: usage._replace(free=sinks.MIN_FREE_BYTES - 1))
    with pytest.raises(OSError, match="no space left to write measurements"):
        sinks.check_free_space(tmp_path)
    monkeypatch.setattr(sinks.shutil, "disk_usage", lambda folder: usage._replace(free=sinks.MIN_FREE_BYTES))
    sinks.check_free_space(tmp_path)


def test_weights_are_no_sinks():
    with pytest.raises(TypeError, match="a sink must have the methods write"):
        SpectralMonitor(sinks=[torch.nn.ReLU()])
    with pytest.raises(TypeError, match="sinks must be a list"):
        SpectralMonitor(sinks=JSONLinesSink("x.jsonl"))
    with pytest.raises(ValueError, match="heatmap_every must be an integer >= 0, got True"):
        SpectralMonitor(heatmap_every=True)
