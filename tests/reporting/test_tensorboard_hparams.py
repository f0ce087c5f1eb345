"""The tab HPARAMS: settings of ours beside the hyperparameters that a logger writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from board import SETTINGS, measurement
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from spectral_monitor.reporting.tensorboard import TensorBoardSink


def hyperparameters(folder):
    """As TensorBoard has them: of each tag what it reads first. Columns, metrics, values."""
    found = EventAccumulator(str(folder)).Reload()
    content = {}
    for tag in (metadata.EXPERIMENT_TAG, metadata.SESSION_START_INFO_TAG):
        try:
            content[tag] = HParamsPluginData.FromString(found.SummaryMetadata(tag).plugin_data.content)
        except KeyError:
            return None
    experiment = content[metadata.EXPERIMENT_TAG].experiment
    values = content[metadata.SESSION_START_INFO_TAG].session_start_info.hparams
    plain = {name: getattr(value, value.WhichOneof("kind")) for name, value in values.items()}
    return [info.name for info in experiment.hparam_infos], [m.name.tag for m in experiment.metric_infos], plain


OURS = {"spectral/mode": "warn", "spectral/condition/band_low": 0.125, "spectral/correction/spectral_init": True}
THEIRS = {"lr": 0.1, "net/width": 64.0, "name": "mine", "tied": True}


@pytest.fixture
def logger(tmp_path):
    logger = TensorBoardLogger(tmp_path, name="run", version="")
    yield logger
    logger.finalize("success")


def log_theirs(logger):
    logger.log_hyperparams({"lr": 0.1, "net": {"width": 64}, "name": "mine", "tied": True})


def test_settings_are_seen_beside_the_hyperparameters_of_a_logger(logger):
    log_theirs(logger)
    logger.save()
    (path,) = Path(logger.log_dir).glob("*tfevents*")
    before, yaml = path.read_bytes(), (path.parent / "hparams.yaml").read_bytes()
    theirs = dict(logger.hparams)
    TensorBoardSink(logger.experiment, SETTINGS)
    columns, metrics, values = hyperparameters(logger.log_dir)
    assert values == THEIRS | OURS
    assert [type(values[name]) for name in OURS] == [str, float, bool]
    assert sorted(columns) == sorted([*THEIRS, *OURS])
    assert metrics == ["hp_metric"]
    assert path.read_bytes() == before
    logger.finalize("success")
    assert dict(logger.hparams) == theirs
    assert (path.parent / "hparams.yaml").read_bytes() == yaml


def test_hyperparameters_that_are_logged_when_training_starts(logger):
    sink = TensorBoardSink(logger.experiment, SETTINGS)
    log_theirs(logger)
    sink.write(measurement())
    assert hyperparameters(logger.log_dir)[2] == THEIRS | OURS


def test_settings_alone_are_written_at_the_end(logger):
    sink = TensorBoardSink(logger.experiment, SETTINGS)
    sink.write(measurement())
    logger.experiment.flush()
    assert hyperparameters(logger.log_dir) is None
    sink.close()
    columns, metrics, values = hyperparameters(logger.log_dir)
    assert (sorted(columns), metrics, values) == (sorted(OURS), [], OURS)


def test_hyperparameters_that_are_logged_late_are_not_hidden(logger):
    sink = TensorBoardSink(logger.experiment, SETTINGS)
    sink.write(measurement())
    log_theirs(logger)
    sink.close()
    assert hyperparameters(logger.log_dir)[2] == THEIRS


def test_a_run_that_is_gone_on_with_in_the_same_folder(tmp_path):
    for settings in (SETTINGS, {"mode": "observe"}):
        logger = TensorBoardLogger(tmp_path, name="run", version="")
        log_theirs(logger)
        TensorBoardSink(logger.experiment, settings)
        logger.finalize("success")
    columns, _, values = hyperparameters(logger.log_dir)
    assert values == THEIRS | {"spectral/mode": "observe"}
    assert sorted(columns) == sorted(values)


def test_a_run_without_hyperparameters_that_is_gone_on_with(tmp_path):
    for mode in ("warn", "observe"):
        logger = TensorBoardLogger(tmp_path, name="run", version="")
        sink = TensorBoardSink(logger.experiment, {**SETTINGS, "mode": mode})
        sink.write(measurement())
        sink.close()
        logger.finalize("success")
    columns, metrics, values = hyperparameters(logger.log_dir)
    assert (sorted(columns), metrics, values) == (sorted(OURS), [], OURS | {"spectral/mode": "observe"})


def test_no_settings_no_hyperparameters(logger):
    sink = TensorBoardSink(logger.experiment)
    sink.write(measurement())
    sink.close()
    logger.experiment.flush()
    assert hyperparameters(logger.log_dir) is None
