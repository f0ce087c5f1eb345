"""The tab HPARAMS: metrics of ours beside the hyperparameters that a logger writes, and no settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from spectral_monitor.reporting.tensorboard_sink.sink import TensorBoardSink
from tests.reporting.board import measurement


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


OURS = ["spectral/summary/violations", "spectral/summary/worst_layer_ratio"]
THEIRS = {"lr": 0.1, "net/width": 64.0, "name": "mine", "tied": True}


@pytest.fixture
def logger(tmp_path):
    logger = TensorBoardLogger(tmp_path, name="run", version="")
    yield logger
    logger.finalize("success")


def log_theirs(logger):
    logger.log_hyperparams({"lr": 0.1, "net": {"width": 64}, "name": "mine", "tied": True})


def test_the_last_violations_are_a_metric_beside_the_hyperparameters_of_a_logger(logger):
    log_theirs(logger)
    logger.save()
    (path,) = Path(logger.log_dir).glob("*tfevents*")
    before, yaml = path.read_bytes(), (path.parent / "hparams.yaml").read_bytes()
    theirs = dict(logger.hparams)
    TensorBoardSink(logger.experiment)
    columns, metrics, values = hyperparameters(logger.log_dir)
    assert values == THEIRS, "nothing of ours"
    assert sorted(columns) == sorted(THEIRS)
    assert metrics == ["hp_metric", *OURS]
    assert path.read_bytes() == before
    logger.finalize("success")
    assert dict(logger.hparams) == theirs
    assert (path.parent / "hparams.yaml").read_bytes() == yaml


def test_the_metric_is_a_number_of_the_run(logger):
    log_theirs(logger)
    sink = TensorBoardSink(logger.experiment)
    for step, outside in ((10, ("tokens",)), (20, ())):
        sink.write(measurement(step, outside=outside))
    sink.close()
    logger.experiment.flush()
    found = EventAccumulator(logger.log_dir).Reload().Scalars(OURS[0])
    assert [event.value for event in found] == [1.0, 0.0]


@pytest.mark.parametrize("when", ["before the first number", "late"])
def test_hyperparameters_that_are_logged_later(logger, when):
    sink = TensorBoardSink(logger.experiment)
    if when == "late":
        sink.write(measurement())
    log_theirs(logger)
    if when != "late":
        sink.write(measurement())
    sink.close()
    assert hyperparameters(logger.log_dir)[1:] == (["hp_metric", *OURS], THEIRS)


def test_without_hyperparameters_there_is_no_such_tab(logger):
    sink = TensorBoardSink(logger.experiment)
    sink.write(measurement())
    sink.close()
    logger.experiment.flush()
    assert hyperparameters(logger.log_dir) is None


def test_a_run_that_is_gone_on_with_in_the_same_folder(tmp_path):
    for _ in range(2):
        logger = TensorBoardLogger(tmp_path, name="run", version="")
        log_theirs(logger)
        TensorBoardSink(logger.experiment)
        logger.finalize("success")
    assert hyperparameters(logger.log_dir)[1:] == (["hp_metric", *OURS], THEIRS)
