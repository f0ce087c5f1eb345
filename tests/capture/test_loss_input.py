"""Losses and what they are given, told by the graph."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from spectral_monitor.capture.replay.loss_graph import has_unfit_input

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
    assert not has_unfit_input(loss())


@pytest.mark.parametrize("loss", WRONG.values(), ids=WRONG)
def test_what_it_does_not_take_is_told(loss):
    assert has_unfit_input(loss())


def test_a_network_behind_the_loss_is_not_looked_through():
    """Its own softmax and log_softmax are its affair, and it may be deep."""
    x = logits()
    for _ in range(50):
        x = nn.Linear(3, 3)(x.softmax(-1).log_softmax(-1))
    nodes = []
    x.register_hook(nodes.append)
    assert not has_unfit_input(F.cross_entropy(x, Y))
