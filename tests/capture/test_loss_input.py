"""Losses and what they are given, told by the graph."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from spectral_monitor.capture.replay.loss_graph import LossFault, fault_of

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 0, 1, 2])
ONES = torch.ones(6, 3)


def logits():
    torch.manual_seed(0)
    return nn.Linear(4, 3)(X)


def sequence():
    """Of 6 steps, a batch of 2 and 3 classes."""
    return nn.Conv1d(4, 3, 1)(torch.randn(2, 4, 6)).permute(2, 0, 1)


def recurrent(dtype=None):
    """The same, batches first: outputs of the LSTM are a view, so that the readout's bias is added apart.

    In half precision without oneDNN, whose LSTMs need a processor with AVX-512 there.
    """
    half = dtype is not None
    with torch.autocast("cpu", dtype, enabled=half), torch.backends.mkldnn.flags(enabled=not half):
        return nn.Linear(8, 3)(nn.LSTM(4, 8, batch_first=True)(torch.randn(2, 6, 4))[0]).transpose(0, 1).float()


def ctc(outputs):
    return F.ctc_loss(outputs, torch.ones(2, 2, dtype=torch.long), torch.full((2,), 6), torch.full((2,), 2))


def focal(z):
    """Takes the sigmoid beside the loss."""
    each = F.binary_cross_entropy_with_logits(z, ONES, reduction="none")
    return ((1 - z.sigmoid()) ** 2 * each).mean()


RIGHT = {
    "cross_entropy": lambda: F.cross_entropy(logits(), Y),
    "label smoothing": lambda: F.cross_entropy(logits(), Y, label_smoothing=0.1),
    "log_softmax twice, which changes nothing": lambda: F.cross_entropy(logits().log_softmax(-1), Y),
    "cross_entropy of scaled sigmoids": lambda: F.cross_entropy(10 * logits().sigmoid(), Y),
    "nll_loss": lambda: F.nll_loss(logits().log_softmax(-1), Y),
    "nll_loss of a logarithm": lambda: F.nll_loss(logits().softmax(-1).log(), Y),
    "binary cross entropy": lambda: F.binary_cross_entropy(logits().sigmoid(), ONES),
    "binary cross entropy with logits": lambda: F.binary_cross_entropy_with_logits(logits(), ONES),
    "focal loss": lambda: focal(logits()),
    "squared error of probabilities": lambda: F.mse_loss(logits().softmax(-1), ONES),
    "distillation": lambda: F.kl_div(logits().log_softmax(-1), logits().softmax(-1).detach(), reduction="sum"),
    "capped logits": lambda: F.cross_entropy(30 * (logits() / 30).tanh(), Y),
    "attention before it": lambda: F.cross_entropy(nn.Linear(3, 3)(logits().softmax(-1)), Y),
    "ctc_loss": lambda: ctc(sequence().log_softmax(-1)),
    "ctc_loss of a recurrent network": lambda: ctc(recurrent().log_softmax(-1)),
    "ctc_loss of log-probabilities with a learned prior": lambda: ctc(
        recurrent().log_softmax(-1) + nn.Parameter(torch.zeros(3))
    ),
    "no graph": lambda: torch.tensor(1.0),
}
WRONG = {
    "softmax": lambda: F.cross_entropy(logits().softmax(-1), Y),
    "sigmoid": lambda: F.cross_entropy(logits().sigmoid(), Y),
    "a module": lambda: nn.CrossEntropyLoss()(nn.Softmax(-1)(logits()), Y),
    "label smoothing": lambda: F.cross_entropy(logits().softmax(-1), Y, label_smoothing=0.1),
    "probabilities as targets": lambda: F.cross_entropy(logits().softmax(-1), ONES / 3),
    "of a sequence": lambda: F.cross_entropy(logits().softmax(-1).view(2, 3, 3).transpose(1, 2), Y.view(2, 3)),
    "in half precision": lambda: F.cross_entropy(logits().bfloat16().softmax(-1).float(), Y),
    "with other losses": lambda: (F.cross_entropy(logits().softmax(-1), Y) + 0.1 * logits().square().mean()) / 4,
    "logits that a ReLU has cut": lambda: F.cross_entropy(logits().relu(), Y),
    "two sigmoids": lambda: F.binary_cross_entropy_with_logits(logits().sigmoid(), ONES),
    "nll_loss of logits": lambda: F.nll_loss(logits(), Y),
    "nll_loss of probabilities": lambda: F.nll_loss(logits().softmax(-1), Y),
    "ctc_loss of logits": lambda: ctc(sequence()),
    "ctc_loss of logits of a recurrent network": lambda: ctc(recurrent()),
    "the same in half precision": lambda: ctc(recurrent(torch.bfloat16)),
    "after the backward pass": lambda: backward(F.cross_entropy(logits().softmax(-1), Y)),
}


def backward(loss):
    loss.backward()
    return loss


@pytest.mark.parametrize("loss", RIGHT.values(), ids=RIGHT)
def test_what_a_loss_takes_is_left_alone(loss):
    assert fault_of(loss()) == LossFault.NONE


@pytest.mark.parametrize("loss", WRONG.values(), ids=WRONG)
def test_what_it_does_not_take_is_told(loss):
    assert fault_of(loss()) == LossFault.KIND


def test_a_network_behind_the_loss_is_not_looked_through():
    """Its own softmax and log_softmax are its affair, and it may be deep."""
    x = logits()
    for _ in range(50):
        x = nn.Linear(3, 3)(x.softmax(-1).log_softmax(-1))
    nodes = []
    x.register_hook(nodes.append)
    assert fault_of(F.cross_entropy(x, Y)) == LossFault.NONE


T = torch.randn(6, generator=torch.Generator().manual_seed(1))


def outputs(size=1):
    torch.manual_seed(0)
    return nn.Linear(4, size)(X)


def energy_distance(x):
    """Compares samples of two distributions, all with all."""
    return 2 * (x - T).abs().mean() - (x - x[:, 0]).abs().mean()


SAME_SHAPES = {
    "columns": lambda: F.mse_loss(outputs(), T[:, None]),
    "rows": lambda: (outputs()[:, 0] - T).square().mean(),
    "as many outputs as samples": lambda: (outputs(6) - torch.randn(6, 6)).square().mean(),
    "one target for all": lambda: (outputs() - 0.5).square().mean(),
    "quantiles": lambda: (outputs() - torch.tensor([0.1, 0.5, 0.9])).abs().mean(),
    "an energy distance": lambda: energy_distance(outputs()),
    "a kernel of two samples": lambda: (-((outputs(3)[:, None] - torch.randn(6, 3)).square().sum(-1))).exp().mean(),
    "distances between outputs": lambda: (outputs() - outputs()[:, 0]).square().mean(),
    "nearest targets": lambda: (outputs() - T).abs().min(dim=1).values.mean(),
    "a gaussian likelihood": lambda: F.gaussian_nll_loss(outputs(), T[:, None], torch.ones(6, 1)),
}
ALL_PAIRS = {
    "mse_loss": lambda: F.mse_loss(outputs(), T),
    "l1_loss": lambda: F.l1_loss(outputs(), T),
    "smooth_l1_loss": lambda: F.smooth_l1_loss(outputs(), T),
    "huber_loss, without a mean": lambda: F.huber_loss(outputs(), T, reduction="none").mean(),
    "by hand": lambda: ((outputs() - T) ** 2).mean(),
    "the other way round": lambda: 0.5 * (T[:, None] - outputs()[:, 0]).pow(2).sum() / 6,
    "multiplied": lambda: ((outputs() - T) * (outputs() - T)).mean(),
    "its root": lambda: ((outputs() - T) ** 2).mean().sqrt(),
    "beside other losses": lambda: F.cross_entropy(logits(), Y) + 0.5 * (outputs() - T).square().mean(),
    "images without their channel": lambda: (
        (nn.Conv2d(2, 1, 1)(torch.randn(5, 2, 3, 3)) - torch.randn(5, 3, 3)).abs().mean()
    ),
    "after the backward pass": lambda: backward((outputs() - T).square().mean()),
}
OVER_SAMPLES = {
    "nll_loss": lambda: F.nll_loss(logits().log_softmax(0), Y),
    "a module": lambda: nn.NLLLoss()(nn.LogSoftmax(0)(logits()), Y),
    "after the backward pass": lambda: backward(F.nll_loss(logits().log_softmax(0), Y)),
}
OVER_CLASSES = {
    "one sample": lambda: F.nll_loss(logits()[0].log_softmax(0), Y[0]),
    "in both directions": lambda: F.nll_loss((outputs(6) @ X[:, :1].T.new_ones(6, 6)).log_softmax(0), torch.arange(6)),
    "the classes first": lambda: F.nll_loss(logits().T.log_softmax(0).T, Y),
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(
    ("loss", "fault"),
    [
        *((loss, LossFault.NONE) for loss in (*SAME_SHAPES.values(), *OVER_CLASSES.values())),
        *((loss, LossFault.ALL_PAIRS) for loss in ALL_PAIRS.values()),
        *((loss, LossFault.OVER_SAMPLES) for loss in OVER_SAMPLES.values()),
    ],
    ids=[*SAME_SHAPES, *OVER_CLASSES, *ALL_PAIRS, *(f"over samples: {name}" for name in OVER_SAMPLES)],
)
def test_samples_that_a_loss_mixes_up(loss, fault):
    assert fault_of(loss()) == fault
