"""Copies of what a forward is given: containers of the user's own keep their classes, and are not made anew."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import InitVar, dataclass, field
from functools import partial

import pytest
import torch
from torch import nn

from spectral_monitor.capture.replay.batch_slicing import leaves, slice_batch
from spectral_monitor.capture.replay.replay import clone_tree

Pair = namedtuple("Pair", "left right")


class Tokens(list):
    """Has a method, and an attribute of its own."""

    name = ""

    def longest(self):
        return max(map(len, self))


class Fields(dict):
    def __getattr__(self, name):
        return self[name]


class Made(Pair):
    """Is made of something else than what it holds."""

    def __new__(cls, x):
        return super().__new__(cls, x, x * 2)


@dataclass
class Scaled:
    x: torch.Tensor
    by: InitVar[int]
    size: int = field(init=False)

    def __post_init__(self, by):
        self.y, self.size = self.x * by, len(self.x)


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    y: torch.Tensor


@dataclass
class Slotted:
    __slots__ = ("x", "y")
    x: torch.Tensor
    y: torch.Tensor


def own_list(x):
    made = Tokens([x, x * 2])
    made.name = "batch"
    return made


def made_otherwise(x):
    made = Made(x)
    made.name = "batch"
    return made


BOXES = {
    "list": own_list,
    "dict": lambda x: Fields(x=x, y=x * 2),
    "ordered": lambda x: OrderedDict(x=x, y=x * 2),
    "default": lambda x: defaultdict(list, x=x, y=x * 2),
    "user": lambda x: UserDict(x=x, y=x * 2),
    "namedtuple": made_otherwise,
    "torch's": lambda x: x.max(1),
    "dataclass": lambda x: Scaled(x, 2),
    "frozen": lambda x: Frozen(x, x * 2),
    "slots": lambda x: Slotted(x, x * 2),
}


@pytest.mark.parametrize("box", BOXES)
def test_a_copy_is_of_the_same_class_and_holds_copies(box):
    given = BOXES[box](torch.arange(12.0).reshape(6, 2))
    before = [(where, copied(leaf)) for where, leaf in leaves(given)]
    for of, count in ((clone_tree, 6), (partial(slice_batch, samples=slice(2)), 2)):
        other = of(given)
        assert type(other) is type(given)
        own, theirs = (getattr(one, "__dict__", {}) for one in (other, given))
        assert own.keys() == theirs.keys()
        assert own.get("name") == theirs.get("name")
        found = dict(leaves(other))
        assert list(found) == [where for where, _ in before]
        for where, leaf in before:
            if isinstance(leaf, torch.Tensor):
                assert torch.equal(found[where], leaf[:count])
                found[where].zero_()
        assert same_leaves(before, leaves(given)), "what was given is as it was"


def copied(leaf):
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def same_leaves(before, after):
    return all(
        a == b and (torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y)
        for (a, x), (b, y) in zip(before, after, strict=True)
    )


def test_methods_and_values_of_containers_stay():
    x = torch.ones(6, 2)
    assert clone_tree(own_list(x)).longest() == 6
    assert clone_tree(Fields(x=x)).x.shape == (6, 2)
    assert clone_tree(Scaled(x, 3)).size == 6
    assert torch.equal(clone_tree(Scaled(x, 3)).y, x * 3)
    assert slice_batch(Scaled(x, 3), slice(2)).y.shape == (2, 2), "though it is no field"
    assert clone_tree(defaultdict(list, x=x))["other"] == []


def test_what_cannot_be_changed_and_holds_nothing_else_is_shared():
    size, pair, words = torch.Size([6, 2]), Pair(1, "two"), ["of", "mine"]
    copy = clone_tree([size, pair, words])
    assert copy[0] is size
    assert copy[1] is pair
    assert copy[2] == words
    assert copy[2] is not words, "the forward may take a word out"


def test_a_module_is_no_container():
    @dataclass(eq=False)
    class Block(nn.Linear):
        width: int

        def __post_init__(self):
            super().__init__(self.width, 2)

    block = Block(3)
    assert clone_tree([block])[0] is block


def test_what_is_its_own_copy_is_refused():
    class Stubborn(list):
        def __copy__(self):
            return self

    given = Stubborn([torch.ones(3)])
    with pytest.raises(TypeError, match="a Stubborn cannot be copied"):
        clone_tree([given])
