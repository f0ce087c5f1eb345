"""Parameters and outputs that are no dense tensors cost their own layers' numbers, and no others."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from spectral_monitor import SpectralProbe

NESTED = "its outputs are a sparse or nested tensor, whose rows cannot be sampled"


class Graph(nn.Module):
    """Two layers with a fixed adjacency matrix in between."""

    def __init__(self, sparse):
        super().__init__()
        adjacency = torch.eye(16).roll(1, 0)
        if sparse:
            self.adjacency = nn.Parameter(adjacency.to_sparse(), requires_grad=False)
        else:
            self.register_buffer("adjacency", adjacency)
        self.before, self.after = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.after(torch.relu(torch.sparse.mm(self.adjacency, self.before(x))))


class Ragged(nn.Module):
    """Its first layers are given sequences of two lengths, the last one a dense tensor."""

    def __init__(self, layout):
        super().__init__()
        self.layout = layout
        self.first, self.second, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        ragged = torch.nested.nested_tensor([x[:5], x[5:]], layout=self.layout)
        return self.last(torch.cat(list(self.second(torch.relu(self.first(ragged))).unbind())))


def trained(make, monitored=True):
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, mode="observe") if monitored else None
    for x in torch.randn(3, 16, 8, generator=torch.Generator().manual_seed(1)):
        optimizer.zero_grad()
        with nullcontext() if probe is None else probe.step():
            model(x).square().mean().backward()
            optimizer.step()
    return model, probe


def test_a_frozen_sparse_parameter_is_listed_and_costs_nothing():
    (model, sparse), (_, dense) = (trained(lambda kind=kind: Graph(kind)) for kind in (True, False))
    plain, _ = trained(lambda: Graph(True), monitored=False)
    assert all(
        torch.equal(p.to_dense(), q.to_dense()) for p, q in zip(model.parameters(), plain.parameters(), strict=True)
    )
    for key, values in dense.latest.values.items():
        torch.testing.assert_close(sparse.latest.values[key], values, equal_nan=True, rtol=1e-5, atol=1e-7)
    reasons = {some.name: some.reason for some in sparse.anatomy.unmeasured}
    assert reasons["adjacency"] == "norms of layout torch.sparse_coo are not supported"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_outputs_have_a_reason_and_other_layers_their_features(layout):
    model, probe = trained(lambda: Ragged(layout))
    plain, _ = trained(lambda: Ragged(layout), monitored=False)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    for layer in ("first", "second"):
        assert probe.latest.value("update_norm", layer) > 0
        assert probe.latest.why("feature_change", layer) == NESTED
    assert probe.latest.value("feature_rms", "last") > 0
    assert probe.latest.value("bfa", "last") > 0
