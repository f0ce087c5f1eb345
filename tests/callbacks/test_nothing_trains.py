"""Runs in which nothing can be judged say so, and never count as healthy."""

import copy
import math

import pytest
import torch

from spectral_monitor import SpectralConditionWarning, SpectralMonitor
from spectral_monitor.measurement import HEALTHY
from spectral_monitor.reporting.content.headline import headline
from tests.callbacks.quickfit import fit
from tests.noninterference import zoo


class RateZero(zoo.Classifier):
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.0)


class BeginsAtZero(zoo.Classifier):
    """A schedule by epochs whose first epoch has a factor of 0, as in a well-known tutorial."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: epoch / 10)]


class CopysParameters(zoo.Classifier):
    """The optimizer was made of a copy of the model."""

    def configure_optimizers(self):
        self.others = [copy.deepcopy(p) for p in self.parameters()]
        return torch.optim.SGD(self.others, lr=0.1)


class NotANumber(zoo.Classifier):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * math.nan


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (RateZero, "every learning rate is 0"),
        (BeginsAtZero, "every learning rate is 0"),
        (CopysParameters, "no optimizer holds its parameters"),
        (NotANumber, "NaN or inf"),
    ],
)
def test_a_warning_says_it_and_no_headline_says_healthy(module, words):
    monitor = SpectralMonitor()
    with pytest.warns(SpectralConditionWarning) as caught:
        fit(monitor, module())
    assert len(monitor.measurements) >= 3
    assert sum(words in str(warning.message) for warning in caught) == 1
    for measurement in monitor.measurements:
        assert "healthy" not in headline(measurement)
        assert not any(state.state == HEALTHY for state in measurement.states.values())
    assert words in headline(monitor.latest)
