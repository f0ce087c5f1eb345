"""Networks that consist of embeddings, such as word2vec and matrix factorization: settings that every table has."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import logsigmoid

from spectral_monitor import SpectralProbe
from spectral_monitor.condition import NETWORK


class SkipGram(nn.Module):
    """Words and contexts with the initial weights of word2vec, whose entries are next to zero."""

    def __init__(self, words=200, width=32):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.contexts = nn.Embedding(words, width), nn.Embedding(words, width)
        for table in (self.words, self.contexts):
            nn.init.uniform_(table.weight, -0.5 / width, 0.5 / width)

    def forward(self, word, context, others):
        own = (self.words(word) * self.contexts(context)).sum(1)
        other = (self.words(word)[:, None] * self.contexts(others)).sum(2)
        return -(logsigmoid(own) + logsigmoid(-other).sum(1)).mean()


def trained(rates=(1.0, 1.0), words=200, batch=256, **options):
    """The roots of 64 steps under Adam, as (layer, cause)."""
    model, generator = SkipGram(words), torch.Generator().manual_seed(1)
    tables = zip((model.words, model.contexts), rates, strict=True)
    groups = [{"params": table.parameters(), "lr": 0.005 * rate} for table, rate in tables]
    optimizer = torch.optim.Adam(groups, **options)
    probe = SpectralProbe(model, optimizer, mode="observe", max_overhead=None)
    for _ in range(64):
        word = torch.randint(words, (batch,), generator=generator)
        with probe.step():
            optimizer.zero_grad()
            loss = model(word, (word + 1) % words, torch.randint(words, (batch, 4), generator=generator))
            probe.report_loss(loss)
            loss.backward()
            optimizer.step()
    return {(verdict.layer, verdict.cause) for latest in probe.measurements for verdict in latest.roots}


def test_a_healthy_run_has_no_verdict():
    assert trained() == set()


@pytest.mark.parametrize(
    ("options", "cause"), [({"eps": 3e-3}, "eps"), ({"betas": (0.999, 0.999)}, "momentum"), ({"eps": 1e-6}, None)]
)
def test_settings_of_the_optimizer_are_looked_at(options, cause):
    assert trained(**options) == ({(NETWORK, cause)} if cause else set())


def test_rows_that_a_batch_does_not_use_are_no_sign_of_a_large_eps():
    assert trained(words=20_000, batch=8, eps=1e-7) == set()


@pytest.mark.parametrize(
    ("rates", "verdict"),
    [
        ((1.0, 0.01), ("contexts", "lr_too_small")),
        ((0.01, 1.0), ("words", "lr_too_small")),
        ((100.0, 1.0), ("words", "lr_too_large")),
    ],
)
def test_the_table_whose_steps_are_far_from_healthy_ones_is_to_blame(rates, verdict):
    """Relative to entries of the usual size: the first steps overwrite those next to zero at any rate."""
    assert trained(rates) == {verdict}
