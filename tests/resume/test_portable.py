"""To plain types and back: values, a module's state, and a forward that another model makes again."""

from __future__ import annotations

import copy
import io
import random
from collections import OrderedDict, deque

import numpy as np
import pytest
import torch
from torch import nn

from spectral_monitor.capture.replay.replay import RootCall
from spectral_monitor.state.rng import RandomState
from spectral_monitor.state.serialize import NotPlainError, fingerprint, pack, pack_state, put_state, unpack
from spectral_monitor.state.snapshot import preserved
from tests.noninterference import zoo

CPU = torch.device("cpu")


def carried(packed):
    """What another process reads."""
    buffer = io.BytesIO()
    torch.save(packed, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def same(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert a.requires_grad == b.requires_grad
        assert torch.equal(a, b)
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        [same(a[key], b[key]) for key in a]
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        [same(x, y) for x, y in zip(a, b, strict=True)]
    else:
        assert a == b


VALUES = [
    None,
    True,
    3,
    2.5,
    "text",
    torch.arange(6).view(2, 3),
    torch.randn(3, 4).to(torch.bfloat16),
    torch.tensor(2.0),
    torch.zeros(0, 3),
    torch.randn(4, 6).T[1:3],
    torch.ones(2, requires_grad=True),
    torch.tensor([True, False]),
    np.arange(6, dtype=np.uint32).reshape(2, 3),
    np.array(1.5),
    [1, [2, (3.0, None)], {4}],
    {"x": torch.ones(2), 1: [torch.zeros(3)], (2, "a"): ()},
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_come_back(value):
    same(unpack(carried(pack(value, "it")), CPU), value)


def test_a_view_is_told_without_its_base():
    packed = pack(torch.zeros(1000, 1000)[:2, :2], "it")
    assert packed[1].untyped_storage().nbytes() == 16


class Thing:
    def __repr__(self):
        return "Thing()"  # the same in every process, for it names tests


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ({"a": [1, Thing()]}, r"batch\['a'\]\[1\] is a Thing"),
        (OrderedDict(a=1), "batch is a OrderedDict"),
        ({Thing(): 1}, "a key of batch is a Thing"),
        (torch.eye(3).to_sparse(), "layout torch.sparse_coo"),
        (torch.ones(2, device="meta"), "on meta"),
        (np.array([Thing()]), "batch is a ndarray"),
        (np.float64(1), "batch is a float64"),
    ],
    ids=str,
)
def test_what_is_not_plain_is_named(value, match):
    with pytest.raises(NotPlainError, match=match):
        pack(value, "batch")


def test_random_states_come_back():
    random.seed(1), np.random.seed(2), torch.manual_seed(3)  # noqa: NPY002
    random.gauss(0, 1), np.random.normal()  # noqa: NPY002  each keeps a second number for the next call
    state = RandomState.now()
    drawn = random.gauss(0, 1), np.random.normal(), torch.rand(1).item()  # noqa: NPY002
    RandomState.unpack(carried(state.pack())).restore()
    assert drawn == (random.gauss(0, 1), np.random.normal(), torch.rand(1).item())  # noqa: NPY002


def test_another_number_of_gpus_is_refused(monkeypatch):
    state = RandomState(random.getstate(), None, torch.get_rng_state(), (torch.get_rng_state(),) * 3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="of 3 GPUs, here are 2"):
        RandomState.unpack(state.pack())


class Meter:
    def __init__(self):
        self.total, self.values = 0.0, []


class Everything(zoo.Restless):
    """Besides what draws and counts: shared lists, hidden modules, objects with data, flags, things left alone."""

    def __init__(self):
        super().__init__()
        self.meter, self.hidden_modules = Meter(), {"norms": [nn.BatchNorm1d(12)]}
        self.alias = self.seen
        self.pairs = (torch.zeros(2), [1])
        self.tool = Thing()
        self.tool.function = print
        self.norm = nn.BatchNorm1d(zoo.CLASSES)

    def forward(self, x):
        self.meter.total += 1
        self.meter.values.append(float(x.sum()))
        self.hidden_modules["norms"][0](self.first(x))
        self.pairs = (self.pairs[0] + 1, [*self.pairs[1], 2])
        self.late = torch.ones(1)
        return self.norm(super().forward(x))


def forwards(model, count):
    for i in range(count):
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(i))
        y = model(x)
    return y


def test_the_state_of_a_module_is_put_into_another():
    model, other = Everything(), Everything()
    other.load_state_dict(model.state_dict())
    forwards(model, 3)
    packed = carried(pack_state(model))
    forwards(other, 7)
    other.extra = [1]  # the packed one had none
    put_state(other, packed)
    assert other.alias is other.seen
    assert other.tool.function is print
    assert not hasattr(other, "extra")
    assert type(other.recent) is deque
    assert other.recent.maxlen == 3
    other.load_state_dict(model.state_dict())
    torch.manual_seed(1), random.seed(1), np.random.seed(1)  # noqa: NPY002
    expected = forwards(copy.deepcopy(model), 2)
    torch.manual_seed(1), random.seed(1), np.random.seed(1)  # noqa: NPY002
    assert torch.equal(forwards(other, 2), expected)
    a, b = pack_state(model), pack_state(copy.deepcopy(model))
    assert fingerprint(a) == fingerprint(b)
    assert fingerprint(a) != fingerprint(pack_state(other))


def test_a_call_is_made_again_by_another_model():
    """With what it drew, what the module remembered, and no trace in that model."""
    model, other = nn.Sequential(Everything()), nn.Sequential(Everything())
    model.train(), forwards(model, 2)
    x = torch.randn(5, 8)
    call = RootCall(model[0], (x.clone(),), {})
    expected = model(x).mean()
    with preserved(model):
        call.rewind()
        packed = carried(call.pack(model))
    model[0].forward = None
    other.load_state_dict(model.state_dict())
    forwards(other, 4)
    before, randomness = fingerprint(pack_state(other)), torch.get_rng_state()
    again = RootCall.unpack(packed, other)
    assert fingerprint(pack_state(other)) == before
    found = []
    other[0].register_forward_hook(lambda module, args, y: found.append(y.detach().clone()))
    for _ in range(2):
        with preserved(other), torch.no_grad():
            again.rewind()
            again()
    assert fingerprint(pack_state(other)) == before
    assert torch.equal(torch.get_rng_state(), randomness)
    assert torch.equal(found[0].mean(), expected)
    assert torch.equal(found[0], found[1])


def test_autocast_is_that_of_the_call():
    model = nn.Linear(3, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        call = RootCall(model, (torch.ones(2, 3),), {})
    again = RootCall.unpack(carried(call.pack(model)), nn.Linear(3, 3))
    dtypes = []
    again.module.register_forward_hook(lambda module, args, y: dtypes.append(y.dtype))
    again()
    assert dtypes == [torch.bfloat16]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda m: delattr(m, "norm"), "has no module 'norm'"),
        (lambda m: setattr(m, "own", 3), "own is no longer a random generator"),
        (lambda m: setattr(m, "meter", 3), "meter is a int, was a Meter"),
        (lambda m: setattr(m, "recent", None), "recent is a NoneType, was a deque"),
    ],
)
def test_another_module_is_refused(change, match):
    packed, other = pack_state(Everything()), Everything()
    change(other)
    with pytest.raises(NotPlainError, match=match):
        put_state(other, packed)


def test_a_fingerprint_is_of_the_content():
    tree = {"a": [torch.ones(2, 3), 1, "x"], "b": None}
    assert fingerprint(tree) == fingerprint(carried(tree))
    others = [
        {"a": [torch.ones(3, 2), 1, "x"], "b": None},
        {"a": [torch.ones(2, 3).double(), 1, "x"], "b": None},
        {"a": [torch.ones(2, 3), 1.0, "x"], "b": None},
        {"a": [torch.ones(2, 3), 1, "y"], "b": None},
        {"a": [torch.ones(2, 3), 1, "x", None], "b": None},
        {"a": [torch.ones(2, 3), 1, "x"], "c": None},
        {"a": [torch.tensor([[1.0, 1, 1], [1, 1, -1]]), 1, "x"], "b": None},
    ]
    assert len({fingerprint(other) for other in [tree, *others]}) == 8
