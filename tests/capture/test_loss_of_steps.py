"""Losses of outputs that a decoder joins step by step."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from spectral_monitor.capture.replay.loss_faults import fault_of
from spectral_monitor.measurement import LossFault
from tests.capture.test_loss_input import Y, logits

YY = torch.cat([Y, Y])


def written(steps):
    """The outputs of the steps, each written into one tensor."""
    outputs = torch.zeros(2, 6, 3)
    for number, step in enumerate(steps):
        outputs[number] = step
    return outputs.view(12, 3)


JOIN = {
    "stack": lambda steps: torch.stack(steps).flatten(0, 1),
    "cat": torch.cat,
    "writing": written,
}


@pytest.mark.parametrize("join", JOIN.values(), ids=JOIN)
def test_what_a_loss_takes_may_be_joined_and_what_it_does_not_take_is_told(join):
    def joined(function):
        return join([function(logits()), function(logits())])

    wrong = {
        LossFault.KIND: [
            F.nll_loss(joined(lambda z: z), YY),
            F.cross_entropy(joined(lambda z: z.softmax(-1)), YY),
        ],
        LossFault.OVER_SAMPLES: [F.nll_loss(joined(lambda z: z.log_softmax(0)), YY)],
        LossFault.NONE: [
            F.nll_loss(joined(lambda z: z.log_softmax(-1)), YY),
            F.nll_loss(joined(lambda z: z).log_softmax(-1), YY),
            F.cross_entropy(joined(lambda z: z), YY),
        ],
    }
    for fault, losses in wrong.items():
        assert [fault_of(loss) for loss in losses] == [fault] * len(losses)


def test_parts_of_different_kinds_are_left_alone():
    """As where scores of pairs stand beside those of a table."""
    assert fault_of(F.cross_entropy(torch.cat([logits(), logits().softmax(-1)]), YY)) == LossFault.NONE
