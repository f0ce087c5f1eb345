"""PyTorch Geometric's graph networks, whose linear layers are its own."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.thirdparty.running import run

NODES, FEATURES, HIDDEN, CLASSES = 20, 6, 8, 3
geometric = pytest.importorskip("torch_geometric.nn")


class Net(nn.Module):
    """Two layers, as in the examples of PyTorch Geometric."""

    def __init__(self, layer, heads=1):
        super().__init__()
        more = {"heads": heads} if heads > 1 else {}
        self.conv1 = layer(FEATURES, HIDDEN, **more)
        self.conv2 = layer(heads * HIDDEN, CLASSES)

    def forward(self, x, edges):
        return self.conv2(functional.relu(self.conv1(x, edges)), edges)


MODELS = {
    "GCN": (lambda: Net(geometric.GCNConv), {"conv1.lin", "conv2.lin"}, {"conv2.lin"}),
    "GAT": (lambda: Net(geometric.GATConv, heads=2), {"conv1.lin", "conv2.lin"}, {"conv2.lin"}),
    "GraphSAGE": (
        lambda: Net(geometric.SAGEConv),
        {f"conv{k}.lin_{side}" for k in (1, 2) for side in "lr"},
        {"conv2.lin_l", "conv2.lin_r"},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_roles_and_features(name):
    make, operators, readouts = MODELS[name]
    model = make()
    x, y = torch.randn(NODES, FEATURES), torch.randint(CLASSES, (NODES,))
    edges = torch.randint(NODES, (2, 60))
    ran = run(model, lambda: functional.cross_entropy(model(x, edges), y))
    dense = {info.name for info in ran.anatomy.infos if info.role in ("operator", "readout")}
    assert operators <= dense
    assert ran.readouts == readouts
    assert not operators & set(ran.bare)
    assert ran.unmeasured("conv1.att", "conv2.att") == {}
