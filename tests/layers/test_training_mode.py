"""Which dropouts and batch norms act as in training, and which are meant to."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spectral_monitor.layers.training_mode import TrainingModes


def block(*others):
    return nn.Sequential(nn.Linear(4, 4), *others)


def share(model):
    return TrainingModes(model).look()["eval_share"]


def largest(model):
    return TrainingModes(model).look()["dropout_largest"]


@pytest.mark.parametrize(
    ("model", "p"),
    [
        (block(), 0.0),
        (block(nn.Dropout(0.1), nn.Dropout2d(0.3)), 0.3),
        (block(nn.Dropout(0.0)), 0.0),
        (nn.Sequential(nn.MultiheadAttention(4, 2, dropout=0.2)), 0.2),
        (nn.Sequential(nn.LSTM(4, 4, num_layers=2, dropout=0.4)), 0.4),
        (nn.Sequential(nn.GRU(4, 4, num_layers=2)), 0.0),
        (nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1), 0.1),
    ],
    ids=lambda case: case.__class__.__name__ if isinstance(case, nn.Module) else str(case),
)
def test_dropouts_are_found_wherever_torch_has_them(model, p):
    assert largest(model) == p
    assert share(model) == 0
    assert share(model.eval()) == (p > 0)


@pytest.mark.filterwarnings("ignore:dropout option adds dropout")
def test_the_dropout_of_a_single_recurrent_layer_does_nothing():
    assert largest(nn.Sequential(nn.LSTM(4, 4, dropout=0.4))) == 0


def test_a_part_that_is_frozen_does_not_count():
    model = nn.ModuleDict({"body": block(nn.Dropout(0.9), nn.BatchNorm1d(4)), "head": block(nn.Dropout(0.1))})
    model["body"].requires_grad_(False).eval()
    assert TrainingModes(model).look() == {"eval_share": 0.0, "dropout_largest": 0.1}
    model["body"].requires_grad_(True)
    assert TrainingModes(model).look() == {"eval_share": 2 / 3, "dropout_largest": 0.9}


def test_batch_norms_that_have_seen_batches_may_be_in_evaluation_mode():
    """As those of a network that is fine-tuned; old checkpoints have not counted batches."""
    model = block(nn.BatchNorm1d(4))
    model(torch.randn(8, 4))
    model[1].num_batches_tracked.zero_()
    model.eval()
    assert share(model) == 0


def test_batch_norms_that_have_not_may_not():
    model = block(nn.BatchNorm1d(4)).eval()
    modes = TrainingModes(model)
    assert modes.look()["eval_share"] == 1
    model.train()
    assert modes.look()["eval_share"] == 0


def test_batch_norms_that_were_in_training_mode_are_to_come_back():
    """As where a loop of one's own evaluates and goes on."""
    model = block(nn.BatchNorm1d(4))
    model(torch.randn(8, 4))
    modes = TrainingModes(model)
    assert modes.look()["eval_share"] == 0
    model.eval()
    assert modes.look()["eval_share"] == 1


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4, track_running_stats=False), nn.LayerNorm(4), nn.GroupNorm(2, 4)])
def test_norms_that_act_alike_in_both_modes_do_not_count(norm):
    assert share(block(norm).eval()) == 0


def test_weights_on_the_meta_device_are_not_read():
    with torch.device("meta"):
        model = block(nn.BatchNorm1d(4))
    assert share(model.eval()) == 0
