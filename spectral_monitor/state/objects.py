"""Objects that modules hold: which of them are looked into, and their attributes, without running their code."""

from __future__ import annotations

import functools
import io
import random
import sys
import types
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

MAX_DEPTH = 8
"""Steps from a module to an object that is looked into: attributes, items of containers, bound methods."""

MAX_OBJECTS = 10_000
"""Objects that one snapshot looks into."""

CONTAINERS = (list, dict, set, deque)
ATOMS = frozenset(
    map(id, (bool, int, float, complex, str, bytes, type(None), type, types.FunctionType, torch.dtype, torch.device))
)
"""Ids of the types of values that hold nothing which a forward may change, and of functions and classes. Ids, because
a class may forbid to be hashed."""

_DATA = (bool, int, float, complex, str, bytes, type(None), Tensor, tuple, *CONTAINERS)
_BASES: dict[type, Any] = {kind: kind for kind in (OrderedDict, *CONTAINERS)}  # an ordered one is a dict, too
_BOUND = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)
_NEVER = (type, types.ModuleType, types.FunctionType, Optimizer)

# Python's own classes, but for these, are locks, threads, queues, weak references, loggers and the like. Objects of the
# packages below keep count of the training itself, or have threads, or are many and do not change.
_PYTHONS = frozenset(
    [
        *("abc", "argparse", "builtins", "collections", "contextlib", "dataclasses", "functools", "numbers"),
        *("random", "_random", "types", "typing"),
    ]
)
_LEFT_ALONE = sys.stdlib_module_names.difference(_PYTHONS, {"__main__"}).union(
    [
        *("accelerate", "aim", "clearml", "comet_ml", "deepspeed", "lightning", "lightning_fabric", "mlflow"),
        *("neptune", "numpy", "omegaconf", "pandas", "pyarrow", "pytorch_lightning", "ray", "spectral_monitor"),
        *("swanlab", "tensorboard", "tensorboardX", "tokenizers", "torch", "triton", "wandb"),
    ]
)
# By their full names, where a user's own package may have the first part of it, and for parts of a package.
_LEFT_ALONE_PARTS = (
    "datasets.arrow_dataset",
    "datasets.iterable_dataset",
    "distributed.client",
    "transformers.tokenization",
    "transformers.trainer",
)
_LIVING = frozenset(
    [
        *("_asyncio", "_io", "_multiprocessing", "_queue", "_socket", "_thread", "asyncio", "concurrent"),
        *("multiprocessing", "queue", "selectors", "socket", "sqlite3", "subprocess", "tempfile", "threading"),
    ]
)


@dataclass(frozen=True)
class Layout:
    """The places where the objects of a class keep their attributes."""

    space: Any  # the descriptor of ``__dict__``, if they have one
    slots: dict[str, Any]  # the descriptors of ``__slots__``, by name
    left_alone: bool  # whether it is, or derives from, a class whose objects have a life of their own


@functools.lru_cache(maxsize=1024)
def layout(kind: type) -> Layout:
    """Find where the objects of a class keep their attributes."""
    space: Any = next((vars(base)["__dict__"] for base in kind.__mro__ if "__dict__" in vars(base)), None)
    if not isinstance(space, (types.GetSetDescriptorType, types.MemberDescriptorType)):
        space = None  # such as a property, which is the class's code
    slots: dict[str, Any] = {}
    for base in kind.__mro__:
        if "__slots__" in vars(base):  # classes written in C have descriptors of the kind that must not be written to
            found = ((name, x) for name, x in vars(base).items() if isinstance(x, types.MemberDescriptorType))
            slots = {**dict(found), **slots}
    return Layout(space, slots, issubclass(kind, _NEVER) or any(map(_is_left_alone, kind.__mro__)))


def _layout_of(value: Any) -> Layout:
    kind: Any = type(value)
    return layout(kind)


def _is_left_alone(kind: type) -> bool:
    module = str(kind.__module__)
    return module.partition(".")[0] in _LEFT_ALONE or module.startswith(_LEFT_ALONE_PARTS)


def read(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, without running its class's properties or ``__getattr__``."""
    where = _layout_of(value)
    found = dict(where.space.__get__(value) or ()) if where.space is not None else {}
    for name, slot in where.slots.items():
        try:
            found[name] = slot.__get__(value)
        except AttributeError:  # nothing is in it
            continue
    return found


def write(value: Any, name: str, item: Any) -> None:
    """Set an attribute of an object, without running its class's ``__setattr__``; frozen dataclasses allow it too."""
    where = _layout_of(value)
    if name in where.slots:
        where.slots[name].__set__(value, item)
    else:
        where.space.__get__(value)[name] = item


def remove(value: Any, name: str) -> None:
    """Delete an attribute of an object, without running its class's ``__delattr__``."""
    where = _layout_of(value)
    if name in where.slots:
        where.slots[name].__delete__(value)
    else:
        del where.space.__get__(value)[name]


def put_back(value: Any, before: dict[str, Any]) -> None:
    """Give an object the attributes that :func:`read` found; what did not change is not written to."""
    now = read(value)
    for name in now.keys() - before.keys():
        remove(value, name)
    for name, item in before.items():
        if name not in now or now[name] is not item:
            write(value, name, item)


def is_looked_into(kind: type) -> bool:
    """Return whether objects of a class, which is no container, are looked into."""
    where = layout(kind)
    return not where.left_alone and (where.space is not None or bool(where.slots))


def has_life(values: list[Any]) -> bool:
    """Return whether what an object holds tells of other threads or files: then its data must not be put back."""
    return any(map(_is_living, set(map(type, values))))


@functools.lru_cache(maxsize=1024)
def _is_living(kind: type) -> bool:
    return str(kind.__module__).partition(".")[0] in _LIVING or issubclass(kind, io.IOBase)


def passed_on(value: Any) -> tuple[Any, ...]:
    """Return what a bound method or a ``functools.partial`` would call with; nothing for anything else."""
    kind = type(value)
    if kind in _BOUND:
        return (value.__self__,)
    if issubclass(kind, functools.partial):
        return tuple(vars(functools.partial)[name].__get__(value) for name in ("func", "args", "keywords"))
    return ()


def is_data(value: Any) -> bool:
    """Return whether an object of a class that is left alone holds nothing but data, no threads or files."""
    if not _layout_of(value).left_alone or issubclass(type(value), _NEVER):
        return False
    space = getattr(value, "__dict__", None)
    return type(space) is dict and all(isinstance(item, _DATA) or is_array(item) for item in space.values())


def is_array(value: Any) -> bool:
    """Return whether a value is an array of numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def generator_types() -> tuple[type, ...]:
    """Return the classes of random generators."""
    numpy = sys.modules.get("numpy")
    of_numpy = (numpy.random.RandomState, numpy.random.Generator, numpy.random.BitGenerator) if numpy else ()
    return (torch.Generator, random.Random, *of_numpy)


def generator_state(generator: Any) -> Any:
    """Return the state of a random generator of torch, Python or numpy."""
    if isinstance(generator, random.Random):
        return random.Random.getstate(generator)
    if hasattr(generator, "get_state"):
        return generator.get_state()
    return getattr(generator, "bit_generator", generator).state


def set_generator_state(generator: Any, state: Any) -> None:
    """Undo what happened to a generator since it was in ``state``."""
    if isinstance(generator, random.Random):
        random.Random.setstate(generator, state)
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        getattr(generator, "bit_generator", generator).state = state


def base_of(box: Any) -> Any:
    """Return the built-in class whose methods read and fill a container, whatever its own class makes of them."""
    kind = type(box)
    return _BASES.get(kind) or next(base for base in _BASES if issubclass(kind, base))


def refill(box: Any, content: list[Any]) -> None:
    """Give a container its old content back, if that changed; for a dict, its items."""
    base = base_of(box)
    if issubclass(base, dict):
        now = list(base.items(box))
        if len(now) != len(content) or any(
            a is not c or b is not d for (a, b), (c, d) in zip(now, content, strict=True)
        ):
            base.clear(box)
            for key, value in content:
                base.__setitem__(box, key, value)
    elif base is set:
        if not set.__eq__(box, set(content)):
            set.clear(box)
            set.update(box, content)
    elif base.__len__(box) != len(content) or any(a is not b for a, b in zip(base.__iter__(box), content, strict=True)):
        base.clear(box)
        base.extend(box, content)
