"""One fault in a deep network is told once, however many layers it disturbs."""

import warnings

import pytest
import torch
from torch import nn

from spectral_monitor import SpectralConditionWarning, SpectralProbe
from spectral_monitor.reporting.content.headline import headline
from tests.one_step import training_step

BLOCKS, WIDTH, VOCABULARY, CONTEXT = 12, 32, 40, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.fc, self.proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, x):
        h = self.norms[0](x)
        attended = nn.functional.scaled_dot_product_attention(self.q(h), self.k(h), self.v(h), is_causal=True)
        x = x + self.out(attended)
        return x + self.proj(nn.functional.gelu(self.fc(self.norms[1](x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.tok(ids) + self.pos.weight
        for block in self.h:
            x = block(x)
        return self.head(self.norm(x))


def trained(faulty, steps=33):
    """Train with some layers at a hundred times the rate; return the warnings and the last measurement."""
    torch.manual_seed(0)
    model = GPT()
    assert sum(p.ndim == 2 for p in model.parameters()) == 75
    groups = [{"params": model.get_submodule(name).parameters(), "lr": 0.1} for name in faulty]
    rest = [p for n, p in model.named_parameters() if not any(n.startswith(f"{name}.") for name in faulty)]
    optimizer = torch.optim.AdamW([{"params": rest}, *groups], lr=1e-3)
    probe = SpectralProbe(model, optimizer, every_n_steps="1, 2, 4, ..., every 100", quantities="light")
    ids = torch.randint(VOCABULARY, (8, CONTEXT + 1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            with training_step(probe, optimizer):
                logits = model(ids[:, :-1])
                nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    told = [str(w.message) for w in caught if issubclass(w.category, SpectralConditionWarning)]
    return told, probe.latest


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("faulty", [(), ("h.7.fc",), ("h.7.fc", "h.3.v")])
def test_each_fault_is_told_once(faulty):
    told, latest = trained(faulty)
    assert len(told) == len(faulty)
    assert all(any(name in text for text in told) for name in faulty)
    assert {verdict.layer for verdict in latest.roots} == set(faulty)
    assert all("use 0.001" in text for text in told)
    line = headline(latest)
    assert "\n" not in line
    if faulty:
        assert f"{len(faulty)} of 75 layers off" in line
        assert all(name in line for name in faulty)
    else:
        assert "all 75 layers healthy" in line
