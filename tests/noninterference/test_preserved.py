"""Whatever a forward may change comes back, and what did not change is not touched."""

from __future__ import annotations

import random
import threading
from collections import Counter, OrderedDict, defaultdict, deque

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAUROC

from spectral_monitor.state.snapshot import MAX_ITEMS, preserved
from tests.noninterference.recorder import leaves, of_module
from tests.noninterference.zoo import Meter, mlp


class Box(nn.Module):
    def __init__(self, thing):
        super().__init__()
        self.thing = thing


CHANGES = {
    "number": (lambda: 1, lambda box: setattr(box, "thing", 2)),
    "new attribute": (lambda: 1, lambda box: setattr(box, "other", 2)),
    "new hook": (lambda: 1, lambda box: box.register_forward_pre_hook(print, with_kwargs=True)),
    "deleted attribute": (lambda: 1, lambda box: delattr(box, "thing")),
    "tensor replaced": (lambda: torch.ones(2), lambda box: setattr(box, "thing", torch.zeros(2))),
    "tensor in place": (lambda: torch.ones(2), lambda box: box.thing.add_(1)),
    "tensor, no version": (lambda: torch.ones(2), lambda box: box.thing.data.add_(1)),
    "tensor resized": (lambda: torch.ones(2), lambda box: box.thing.resize_(3).zero_()),
    "tensor, other memory": (lambda: torch.ones(2), lambda box: setattr(box.thing, "data", torch.zeros(5))),
    "NaN": (lambda: torch.full((2,), torch.nan), lambda box: box.thing.zero_()),
    "sign of zero": (lambda: torch.zeros(4), lambda box: box.thing.data.neg_()),
    "conjugate": (lambda: torch.full((2,), 1j).conj(), lambda box: box.thing.data.mul_(2)),
    "columns": (lambda: torch.ones(4, 6)[:, ::2], lambda box: box.thing.data.mul_(2)),
    "integers": (lambda: torch.arange(3), lambda box: box.thing.data.add_(1)),
    "eight bits": (lambda: torch.ones(3).to(torch.float8_e4m3fn), lambda box: box.thing.data.fill_(2)),
    "sparse": (lambda: torch.eye(3).to_sparse(), lambda box: box.thing.mul_(2)),
    "list": (lambda: [1, 2], lambda box: box.thing.append(3)),
    "long list": (lambda: [1] * (MAX_ITEMS + 1), lambda box: box.thing.clear()),
    "list in a dict": (lambda: {"a": [1]}, lambda box: box.thing["a"].append(2)),
    "tensor in a tuple in a list": (lambda: [(torch.ones(2),)], lambda box: box.thing[0][0].data.zero_()),
    "ordered": (lambda: OrderedDict(a=1, b=2), lambda box: box.thing.move_to_end("a")),
    "defaults": (lambda: defaultdict(list), lambda box: box.thing["a"].append(2)),
    "counter": (lambda: Counter("aab"), lambda box: box.thing.update("abc")),
    "deque": (lambda: deque([1, 2], maxlen=2), lambda box: box.thing.append(3)),
    "set": (lambda: {1, 2}, lambda box: box.thing.discard(1)),
    "array": (lambda: np.arange(3.0), lambda box: box.thing.__iadd__(1)),
    "torch generator": (torch.Generator, lambda box: torch.rand(1, generator=box.thing)),
    "python generator": (lambda: random.Random(1), lambda box: box.thing.random()),
    "numpy generator": (lambda: np.random.default_rng(1), lambda box: box.thing.random()),
    "meter": (Meter, lambda box: box.thing.update(2.0)),
    "metric": (MeanMetric, lambda box: box.thing(torch.ones(3))),
    "metric in a list": (lambda: [MeanMetric()], lambda box: box.thing[0].update(1.0)),
    "metric with lists": (lambda: MulticlassAUROC(2), lambda box: box.thing.update(torch.eye(2), torch.arange(2))),
    "module": (mlp, lambda box: box.thing[0].weight.data.mul_(2)),
    "module's parameter": (mlp, lambda box: setattr(box.thing[0], "bias", None)),
    "module's flag": (mlp, lambda box: box.thing.eval()),
    "module's gradient": (mlp, lambda box: setattr(box.thing[0].weight, "grad", torch.ones(16, 8))),
    "module's child": (mlp, lambda box: box.thing.add_module("9", nn.Linear(2, 2))),
    "module in a list": (lambda: [mlp()], lambda box: box.thing[0][3].weight.data.mul_(2)),
    "buffer": (lambda: nn.BatchNorm1d(2), lambda box: box.thing(torch.randn(4, 2))),
    "buffer replaced": (lambda: nn.BatchNorm1d(2), lambda box: setattr(box.thing, "running_mean", torch.ones(2))),
    "new buffer": (lambda: nn.BatchNorm1d(2), lambda box: box.thing.register_buffer("new", torch.ones(2))),
}


def state(box):
    return {**of_module(box), **dict(leaves("thing", getattr(box, "thing", "gone")))}


def change_and_fail(box, change):
    with preserved(box):
        change(box)
        raise KeyError


@pytest.mark.parametrize("name", CHANGES)
@torch.no_grad()
def test_it_comes_back(name):
    make, change = CHANGES[name]
    box = Box(make())
    before = state(box)
    with preserved(box):
        change(box)
        assert state(box) != before, "the change is seen"
    assert state(box) == before
    with pytest.raises(KeyError):
        change_and_fail(box, change)
    assert state(box) == before


def test_a_list_may_hold_itself():
    box = Box([])
    box.thing.append(box.thing)
    with preserved(box):
        box.thing.append(1)
    assert len(box.thing) == 1
    assert box.thing[0] is box.thing


def test_memory_stays_where_it_was():
    box = Box(mlp())
    weight, pointer = box.thing[0].weight, box.thing[0].weight.data_ptr()
    with preserved(box):
        weight.data = weight.data * 2
    assert weight.data_ptr() == pointer


def test_what_did_not_change_is_not_written_to():
    box = Box([nn.BatchNorm1d(4).eval(), mlp(), {"scale": torch.ones(4), "unknown": torch.full((4,), torch.nan)}])
    tensors = [*box.thing[0].state_dict().values(), *box.thing[1].parameters(), *box.thing[2].values()]
    versions = [t._version for t in tensors]
    x = torch.randn(5, 4, requires_grad=True)
    loss = (box.thing[0](x) * box.thing[2]["scale"]).sum()
    with preserved(box), torch.no_grad():
        box.thing[0](x)
    assert [t._version for t in tensors] == versions
    loss.backward()  # what it saved is as it was


class Loader:
    """Not only data: a lock."""

    def __init__(self):
        self.state, self.lock = {}, threading.Lock()


@pytest.mark.parametrize("thing", [Loader(), torch.optim.SGD([torch.ones(2)])], ids=["lock", "optimizer"])
def test_what_may_have_a_life_of_its_own_is_left_alone(thing):
    box = Box(thing)
    with preserved(box):
        thing.state["a"] = 1
    assert thing.state == {"a": 1}
