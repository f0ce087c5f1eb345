"""What plain objects of a module hold comes back as well: generators, slots, objects in objects, partials."""

from __future__ import annotations

import array
import dataclasses
import functools
import io
import itertools
import random
import threading
import types
from collections import OrderedDict, UserDict, deque

import numpy as np
import pytest
import torch
from torch import nn

from spectral_monitor.state.objects import MAX_DEPTH
from spectral_monitor.state.serialize import pack_state, put_state
from spectral_monitor.state.snapshot import Snapshot, preserved


class Plain:
    def __init__(self, **held):
        self.__dict__.update(held)

    def count(self):
        self.n += 1
        return self.n


class Slots:
    __slots__ = ("__private", "n")

    def __init__(self):
        self.n, self.__private = 0, 0

    def count(self):
        self.n, self.__private = self.n + 1, self.__private + 2
        return self.n + self.__private


class SlotsAndMore(Slots):
    __slots__ = ("__dict__", "empty")

    def count(self):
        self.more = getattr(self, "more", 0) + 1  # in __dict__
        self.empty = getattr(self, "empty", 0) + 1
        return super().count() + self.more + self.empty


@dataclasses.dataclass(slots=True)
class SlotsData:
    n: int = 0

    def count(self):
        self.n += 1
        return self.n


@dataclasses.dataclass(frozen=True)
class Frozen:
    n: int = 0

    def count(self):
        object.__setattr__(self, "n", self.n + 1)
        return self.n


class Items(list):
    k = 0


class Sealed:
    """Its attributes are not to be asked for, or set, by anyone else."""

    def __init__(self):
        vars(self)["n"] = 0

    @property
    def size(self):
        raise AssertionError("asked for")

    def __getattr__(self, name):
        raise AssertionError("asked for")

    def __setattr__(self, name, item):
        raise AssertionError("set")

    def count(self):
        vars(self)["n"] += 1
        return vars(self)["n"]


class Counting(dict):
    """Counts what is set."""

    def __init__(self):
        super().__init__()
        self.sets = 0

    def __setitem__(self, key, value):
        self.sets += 1
        super().__setitem__(key, value)


class Own(random.Random):
    pass


def nested(**held):
    return Plain(a=Plain(b=[{"c": Plain(**held)}]))


def below(thing):
    return thing.a.b[0]["c"]


def counted(thing):
    return thing.count()


def drawn(generator):
    return torch.rand(1, generator=generator).item()


def added(box):
    box[len(box)] = 1
    return len(box), getattr(box, "sets", 0)


def named(items):
    items.k += 1
    return items.k


def grown(entries):
    entries.extend(entries)
    return len(entries)


KINDS = {
    "torch generator": (lambda: Plain(r=torch.Generator()), lambda thing: drawn(thing.r)),
    "numpy generator": (lambda: Plain(r=np.random.default_rng(0)), lambda thing: thing.r.random()),
    "numpy state": (lambda: Plain(r=np.random.RandomState(0)), lambda thing: thing.r.rand()),
    "bit generator": (lambda: Plain(r=np.random.PCG64(0)), lambda thing: thing.r.random_raw()),
    "python generator": (lambda: Plain(r=random.Random(0)), lambda thing: thing.r.random()),
    "generator's subclass": (lambda: Plain(r=Own(0)), lambda thing: thing.r.random()),
    "generator's method": (lambda: np.random.default_rng(0).random, lambda thing: thing()),
    "python generator's method": (lambda: random.Random(0).random, lambda thing: thing()),
    "generator far below": (lambda: nested(r=torch.Generator()), lambda thing: drawn(below(thing).r)),
    "generator beside a lock": (lambda: Plain(r=random.Random(0), lock=threading.Lock()), lambda x: x.r.random()),
    "counter": (lambda: Plain(n=0), counted),
    "counter far below": (lambda: nested(n=0), lambda thing: below(thing).count()),
    "counter beside a function": (lambda: Plain(n=0, function=print), counted),
    "slots": (Slots, counted),
    "slots and more": (SlotsAndMore, counted),
    "dataclass with slots": (SlotsData, counted),
    "frozen dataclass": (Frozen, counted),
    "namespace": (lambda: types.SimpleNamespace(a=Plain(n=0)), lambda thing: thing.a.count()),
    "tensor far below": (lambda: nested(t=torch.zeros(1)), lambda thing: below(thing).t.add_(1).item()),
    "array far below": (lambda: nested(t=np.zeros(1)), lambda thing: float(below(thing).t.__iadd__(1)[0])),
    "module far below": (lambda: nested(m=nn.BatchNorm1d(1)), lambda thing: moved(below(thing).m)),
    "list with attributes": (lambda: Items([0]), named),
    "dict that counts": (Counting, added),
    "user's dict": (UserDict, added),
    "bytes": (lambda: bytearray(1), grown),
    "array of Python": (lambda: array.array("i", [1]), grown),
    "partial": (lambda: functools.partial(counted, Plain(n=0)), lambda thing: thing()),
    "partial, keyword": (lambda: functools.partial(counted, thing=Plain(n=0)), lambda thing: thing()),
    "partial of a partial": (lambda: functools.partial(functools.partial(counted, Slots())), lambda thing: thing()),
    "bound method": (lambda: Plain(n=0).count, lambda thing: thing()),
    "objects in a tuple": (lambda: (Plain(n=0), Slots()), lambda thing: (thing[0].count(), thing[1].count())),
    "objects in a frozen set": (lambda: frozenset([Plain(n=0)]), lambda thing: next(iter(thing)).count()),
    "objects in a deque": (lambda: deque([Slots()]), lambda thing: thing[0].count()),
    "sealed": (Sealed, counted),
}
UNPACKED = {"bytes", "array of Python", "objects in a frozen set"}


def moved(norm):
    norm(torch.arange(2.0)[:, None])
    return norm.running_mean.item()


class Box(nn.Module):
    def __init__(self, thing):
        super().__init__()
        self.thing = thing


@pytest.mark.parametrize("name", KINDS)
def test_it_comes_back(name):
    make, use = KINDS[name]
    box = Box(make())
    thing = box.thing
    with preserved(box):
        first = use(box.thing)
        assert use(box.thing) != first, "the change is seen"
    assert box.thing is thing
    state = Snapshot(box, weights=False)
    assert use(box.thing) == first
    assert not state.refused
    state.restore()
    assert use(box.thing) == first


@pytest.mark.parametrize("name", [name for name in KINDS if name not in UNPACKED])
def test_it_is_put_into_another_module(name):
    make, use = KINDS[name]
    box, other = Box(make()), Box(make())
    use(box.thing)
    packed, thing = pack_state(box), other.thing
    second = use(box.thing)
    use(other.thing), use(other.thing)
    put_state(other, packed)
    assert other.thing is thing or isinstance(thing, tuple)
    assert use(other.thing) == second


def test_objects_are_not_exchanged():
    inner = Slots()
    box = Box(Plain(a=[Plain(b=inner)]))
    with preserved(box):
        box.thing.a[0].b = Slots()
        box.thing.a = []
    assert box.thing.a[0].b is inner


def test_objects_may_refer_to_each_other_and_to_the_module():
    box = Box(Plain(n=0))
    box.thing.box, box.thing.itself, box.thing.next = box, box.thing, Plain(back=box.thing, n=0)
    with preserved(box):
        box.thing.count(), box.thing.next.count()
    assert (box.thing.n, box.thing.next.n) == (0, 0)


def test_an_ordered_dict_comes_back_in_order():
    box = Box(OrderedDict(a=1, b=2))
    with preserved(box):
        box.thing.move_to_end("a")
    assert list(box.thing) == ["a", "b"]
    assert list(reversed(box.thing)) == ["b", "a"]


def chain(length):
    last = Plain(n=0)
    for _ in range(length - 1):
        last = Plain(a=last)
    return last


class Odd(type):
    """A class that does not say where it is from."""

    @property
    def __module__(cls):
        raise RuntimeError("do not look")


class NotHashed(type):
    __hash__ = None


class Proxy:
    @property
    def __class__(self):
        raise RuntimeError("do not look")

    @property
    def __dict__(self):
        raise RuntimeError("do not look")


REFUSED = {
    "too deep": (
        lambda: chain(MAX_DEPTH + 1),
        f"state of a Plain cannot be put back: it is more than {MAX_DEPTH} steps",
    ),
    "too many": (lambda: [[Plain(n=i) for i in range(60)] for _ in range(2)], "it is one of more than 100"),
    "cannot be read": (lambda: Odd("Thing", (), {})(), "it cannot be read (RuntimeError: do not look)"),
    "not hashed": (lambda: NotHashed("Thing", (), {})(), "it cannot be read (TypeError: unhashable type"),
    "iterator far below": (lambda: nested(i=itertools.count()), "count"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_put_back_is_named(name, monkeypatch):
    make, reason = REFUSED[name]
    monkeypatch.setattr("spectral_monitor.state.objects.MAX_OBJECTS", 100)
    box = Box(make())
    box.n = 0
    state = Snapshot(box)
    box.n += 1
    state.restore()
    assert box.n == 0
    (told,) = [*state.refused, *state.iterators]
    assert reason in told


def test_nothing_is_run_where_something_cannot_be_read():
    with pytest.raises(RuntimeError, match="do not look"), preserved(Box(Odd("Thing", (), {})())):
        pytest.fail("it is run")


def test_a_proxy_is_not_asked_for_what_it_stands_for():
    assert not Snapshot(Box([Proxy()])).refused


def test_the_nearest_way_to_an_object_counts():
    thing = chain(MAX_DEPTH + 3)
    half = thing.a.a.a.a.a
    assert Snapshot(Box(thing)).refused
    assert not Snapshot(Box([thing, half])).refused


def test_one_that_cannot_be_put_back_costs_no_other():
    box = Box(bytearray(1))
    box.other = Plain(n=0)
    state = Snapshot(box)
    box.thing.append(1)
    box.other.count()
    with memoryview(box.thing), pytest.raises(BufferError):  # it cannot be resized now
        state.restore()
    assert box.other.n == 0


@pytest.mark.parametrize(
    "thing",
    [
        Plain(n=0, lock=threading.Lock()),
        Plain(n=0, thread=threading.Thread()),
        Plain(n=0, file=io.StringIO()),
        type("Data", (torch.utils.data.Dataset,), {"n": 0, "count": Plain.count, "part": None})(),
    ],
    ids=["lock", "thread", "file", "dataset"],
)
def test_what_may_have_a_life_of_its_own_is_left_alone(thing):
    thing.part = Plain(n=0)
    state = Snapshot(Box(thing))
    thing.count(), thing.part.count()
    state.restore()
    assert (thing.n, thing.part.n) == (1, 1)
    assert not state.refused
