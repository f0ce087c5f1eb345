"""Losses and what they are given, told by the graph."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from spectral_monitor.capture.replay.loss_faults import LossCheck, fault_of, takes_samples_for_sequence
from spectral_monitor.measurement import LossFault

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
    "logsigmoid of differences": lambda: -F.logsigmoid(logits()[:, 0] - logits()[:, 1]).mean(),
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
    "a sigmoid before logsigmoid, as in losses of pairs": lambda: -F.logsigmoid(logits().sigmoid()).mean(),
    "two sigmoids in the model": lambda: F.mse_loss(logits().sigmoid().sigmoid(), ONES),
    "two softmaxes in the model": lambda: F.nll_loss(logits().softmax(-1).softmax(-1).log(), Y),
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


SAMPLES, STEPS, WIDTH = 12, 5, 8
SEQUENCES = torch.randn(SAMPLES, STEPS, WIDTH, generator=torch.Generator().manual_seed(2))
CLASSES = torch.arange(SAMPLES) % 3


class Handwritten(nn.Module):
    """Attention with four dimensions, samples first."""

    def forward(self, x):
        q = x.view(len(x), -1, 2, WIDTH // 2).transpose(1, 2)
        return ((q @ q.mT).softmax(-1) @ q).transpose(1, 2).flatten(2)


class Attention(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=options.pop("batch_first", False))

    def forward(self, x):
        return self.attention(x, x, x, **self.options)[0]


def encoder(dropout=0.0, **options):
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout, **options), 2)


KINDS = {
    "LSTM": partial(nn.LSTM, WIDTH, WIDTH),
    "two layers": partial(nn.LSTM, WIDTH, WIDTH, num_layers=2),
    "in both directions": partial(nn.GRU, WIDTH, WIDTH, bidirectional=True),
    "GRU": partial(nn.GRU, WIDTH, WIDTH),
    "RNN": partial(nn.RNN, WIDTH, WIDTH),
    "attention": Attention,
    "attention without its weights": partial(Attention, need_weights=False),
    "encoder": encoder,
    "encoder with dropout": partial(encoder, dropout=0.1),
}


def classified(module, x, dim=1, pick=None):
    """A loss over one prediction for each sample."""
    torch.manual_seed(0)
    outputs = module(nn.Linear(x.shape[-1], WIDTH)(x))
    outputs = outputs[0] if isinstance(outputs, tuple) else outputs
    outputs = outputs.mean(dim) if pick is None else outputs.select(dim, pick)
    return F.cross_entropy(nn.Linear(outputs.shape[-1], 3)(outputs), CLASSES[: len(outputs)])


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("pick", [None, -1], ids=["mean", "last"])
def test_samples_that_a_module_takes_for_a_sequence(make, pick):
    assert takes_samples_for_sequence(classified(make(), SEQUENCES, pick=pick))
    assert not takes_samples_for_sequence(classified(make(batch_first=True), SEQUENCES, pick=pick))
    swapped = SEQUENCES.transpose(0, 1)
    assert not takes_samples_for_sequence(classified(make(), swapped, dim=0, pick=pick)), "as it should be"


def predicted(module, x, flat):
    """A loss over one prediction for each step, as of a language model."""
    outputs = module(x)[0] if not isinstance(module, nn.TransformerEncoder) else module(x)
    outputs = nn.Linear(outputs.shape[-1], 1)(outputs).squeeze(-1)
    outputs = outputs.flatten() if flat else outputs
    return (outputs - torch.zeros_like(outputs)).square().mean()


HEALTHY_SEQUENCES = {
    "a language model": lambda: predicted(nn.LSTM(WIDTH, WIDTH), SEQUENCES, flat=True),
    "a loss of steps by samples": lambda: predicted(nn.GRU(WIDTH, WIDTH), SEQUENCES, flat=False),
    "a single sequence": lambda: predicted(nn.LSTM(WIDTH, WIDTH), SEQUENCES[:, :1], flat=True),
    "a single sequence under attention": lambda: predicted(encoder(), SEQUENCES[:, :1], flat=True),
    "without a batch": lambda: predicted(nn.LSTM(WIDTH, WIDTH), SEQUENCES[:, 0], flat=True),
    "attention without a batch": lambda: classified(encoder(), SEQUENCES[:, 0][None]),
    "by hand": lambda: classified(Handwritten(), SEQUENCES),
    "as many steps as samples": lambda: classified(encoder(batch_first=True), SEQUENCES[:STEPS]),
    "windows, as many steps in each as samples": lambda: classified(
        nn.Sequential(nn.Unflatten(0, (-1, 2)), nn.Flatten(0, 1), encoder(batch_first=True), nn.Unflatten(0, (-1, 2)),
                      nn.Flatten(1, 2)),
        torch.randn(10, 5, WIDTH),
    ),
    "outputs of samples that are stacked": lambda: F.cross_entropy(
        nn.Linear(STEPS * WIDTH, 3)(torch.stack([nn.Linear(WIDTH, WIDTH)(x) for x in SEQUENCES]).flatten(1)), CLASSES
    ),
    "no sequence": lambda: F.cross_entropy(logits(), Y),
    "no graph": lambda: torch.tensor(1.0),
}  # fmt: skip


@pytest.mark.parametrize("loss", HEALTHY_SEQUENCES.values(), ids=HEALTHY_SEQUENCES)
def test_sequences_as_they_should_be(loss):
    assert not takes_samples_for_sequence(loss())


def test_the_sequences_are_looked_for_once_and_stay():
    check = LossCheck()
    assert check.fault is None
    for _ in range(2):
        check.begin()
        check.look(classified(KINDS["LSTM"](), SEQUENCES))
        assert check.fault == LossFault.SEQUENCE
    check.begin()
    check.look(F.cross_entropy(logits(), Y))
    assert check.fault == LossFault.SEQUENCE


LABELS = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0, 1.0])
UNFIT_TARGETS = {
    "masks up to 255": 255 * LABELS,
    "classes 1 and 2": LABELS + 1,
    "labels -1 and 1": 2 * LABELS - 1,
}
FIT_TARGETS = {
    "labels": LABELS,
    "probabilities": torch.linspace(0, 1, 6),
    "smoothed with noise, as in GANs": torch.tensor([-0.1, 1.2, 0.7, 0.3, 0.0, 1.1]),
}


def binary(targets, late=False):
    losses = F.binary_cross_entropy_with_logits(nn.Linear(4, 1)(torch.ones(6, 4))[:, 0], targets)
    loss = losses + 0.1 * torch.zeros(3, requires_grad=True).square().sum()
    if late:
        loss.backward()
    return loss


def fault_at(loss, **options):
    check = LossCheck(**options)
    check.begin()
    check.look(loss)
    return check.fault


@pytest.mark.parametrize("targets", UNFIT_TARGETS.values(), ids=UNFIT_TARGETS)
def test_targets_that_are_no_probabilities(targets):
    assert fault_at(binary(targets)) == LossFault.TARGETS
    assert fault_at(binary(targets, late=True)) == LossFault.NONE, "the graph has lost them"
    assert fault_at(binary(targets), reads_targets=False) == LossFault.NONE, "they differ between processes"
    assert fault_at(F.mse_loss(torch.zeros(6, requires_grad=True), targets)) == LossFault.NONE


@pytest.mark.parametrize("targets", FIT_TARGETS.values(), ids=FIT_TARGETS)
def test_targets_that_are_probabilities(targets):
    assert fault_at(binary(targets)) == LossFault.NONE


def test_targets_are_read_once_and_stay_unfit():
    check = LossCheck()
    for targets in (255 * LABELS, LABELS):
        check.begin()
        check.look(binary(targets))
        assert check.fault == LossFault.TARGETS
