"""Which forward features are taken from, when a step has several."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spectral_monitor import SpectralProbe


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.maker, self.judge = nn.Linear(3, 6), nn.Linear(6, 2)


@pytest.fixture
def parts():
    torch.manual_seed(1)
    return Parts()


def rms(h):
    return float(h.detach().square().mean().sqrt())


def test_a_generator_is_seen_though_the_discriminator_is_trained_in_between(parts):
    judging, making = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (parts.judge, parts.maker))
    probe = SpectralProbe(parts, [judging, making], every_n_steps=1)
    noise, real = torch.randn(5, 3), torch.randn(5, 6)
    with probe.step():
        fake = parts.maker(noise)
        judged = torch.cat([parts.judge(real), parts.judge(fake.detach())])
        (judged[:5].mean() - judged[5:].mean()).backward()
        judging.step()
        parts.judge(fake).square().mean().backward()
        making.step()
    m = probe.latest
    assert m.value("feature_rms", "maker") == pytest.approx(rms(fake), rel=1e-6)
    assert m.value("feature_rms", "judge") == pytest.approx(rms(judged), rel=1e-6)  # of its own step's forward alone
    b = torch.autograd.grad(parts.judge(fake).square().mean(), fake)[0]
    assert m.value("backward_stable_rank", "maker") == pytest.approx(
        float((b.norm() / torch.linalg.matrix_norm(b, 2)) ** 2), rel=1e-4
    )


def test_of_several_micro_batches_the_last_counts_in_every_part(parts):
    """The frozen part gets no gradient to tell that its forward is over."""
    optimizer = torch.optim.SGD([*parts.maker.parameters(), *parts.judge.parameters()], lr=0.1)
    probe = SpectralProbe(parts, optimizer, every_n_steps=1)
    with probe.step(accumulated=3):
        for _ in range(3):
            x = torch.randn(5, 3)
            frozen = parts.frozen(x)
            made = parts.maker(frozen)
            parts.judge(made).square().mean().div(3).backward()
        optimizer.step()
    for name, h in {"frozen": frozen, "maker": made}.items():
        assert probe.latest.value("feature_rms", name) == pytest.approx(rms(h), rel=1e-6)
