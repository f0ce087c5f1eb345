"""The training step that most tests take under a probe."""

from contextlib import contextmanager

import torch

from spectral_monitor import SpectralProbe


@contextmanager
def training_step(probe, optimizer):
    """Clear gradients before the block, which makes new ones, and step after it, all in a step of the probe."""
    with probe.step():
        optimizer.zero_grad()
        yield
        optimizer.step()


def after_one_step(model, loss, lr=0.1, **settings):
    """The probe of a model after its first step, of gradient descent on what ``loss`` returns."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    probe = SpectralProbe(model, optimizer, **settings)
    with probe.step():
        loss().backward()
        optimizer.step()
    return probe
