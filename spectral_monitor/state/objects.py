"""Attributes of objects that modules hold: read and restored without running the objects' own code.

An object is looked into, so that its attributes are restored, unless its class is left alone.
"""

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
"""Steps from a module to an object that is looked into. A step is an attribute, an item or a bound method."""

MAX_OBJECTS = 10_000
"""Number of objects that one snapshot looks into."""

CONTAINERS = (list, dict, set, deque)
ATOMS = frozenset(
    map(id, (bool, int, float, complex, str, bytes, type(None), type, types.FunctionType, torch.dtype, torch.device))
)
"""Ids of types whose values hold nothing that a forward can change, and of functions and classes. Ids, because a class
may be unhashable."""

_DATA = (bool, int, float, complex, str, bytes, type(None), Tensor, tuple, *CONTAINERS)
_BASES: dict[type, Any] = {kind: kind for kind in (OrderedDict, *CONTAINERS)}  # OrderedDict first: it is a dict too
_BOUND = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)
_NEVER = (type, types.ModuleType, types.FunctionType, Optimizer)

# Other modules of Python define locks, threads, queues, weak references, loggers and the like. The packages below have
# objects that count training steps, run threads, or are many and never change.
_STANDARD_MODULES_LOOKED_INTO = frozenset(
    [
        *("abc", "argparse", "builtins", "collections", "contextlib", "dataclasses", "functools", "numbers"),
        *("random", "_random", "types", "typing"),
    ]
)
_LEFT_ALONE = sys.stdlib_module_names.difference(_STANDARD_MODULES_LOOKED_INTO, {"__main__"}).union(
    [
        *("accelerate", "aim", "clearml", "comet_ml", "deepspeed", "lightning", "lightning_fabric", "mlflow"),
        *("neptune", "numpy", "omegaconf", "pandas", "pyarrow", "pytorch_lightning", "ray", "spectral_monitor"),
        *("swanlab", "tensorboard", "tensorboardX", "tokenizers", "torch", "triton", "wandb"),
    ]
)
# Submodules, where only part of a package is left alone or where a user's package may have the same top-level name.
_LEFT_ALONE_PREFIXES = (
    "datasets.arrow_dataset",
    "datasets.iterable_dataset",
    "distributed.client",
    "transformers.tokenization",
    "transformers.trainer",
)
_MODULES_OF_LIVE_OBJECTS = frozenset(
    [
        *("_asyncio", "_io", "_multiprocessing", "_queue", "_socket", "_thread", "asyncio", "concurrent"),
        *("multiprocessing", "queue", "selectors", "socket", "sqlite3", "subprocess", "tempfile", "threading"),
    ]
)


@dataclass(frozen=True)
class Layout:
    """The storage of the attributes of a class's objects."""

    namespace: Any  # the descriptor of ``__dict__``; ``None`` without one
    slots: dict[str, Any]  # the descriptors of ``__slots__``, by name
    left_alone: bool  # whether the class or a base is left alone


@functools.lru_cache(maxsize=1024)
def layout(kind: type) -> Layout:
    """Return where the objects of a class keep their attributes."""
    namespace: Any = next((vars(base)["__dict__"] for base in kind.__mro__ if "__dict__" in vars(base)), None)
    if not isinstance(namespace, (types.GetSetDescriptorType, types.MemberDescriptorType)):
        namespace = None  # a property, for example, would run the class's code
    slots: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if "__slots__" in vars(base):  # classes written in C have such descriptors too, which must not be written to
            slots.update(
                (key, value) for key, value in vars(base).items() if isinstance(value, types.MemberDescriptorType)
            )
    return Layout(namespace, slots, issubclass(kind, _NEVER) or any(map(_is_left_alone, kind.__mro__)))


def _layout_of(value: Any) -> Layout:
    kind: Any = type(value)
    return layout(kind)


def _is_left_alone(kind: type) -> bool:
    module = str(kind.__module__)
    return module.partition(".")[0] in _LEFT_ALONE or module.startswith(_LEFT_ALONE_PREFIXES)


def read(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, without running its class's properties or ``__getattr__``."""
    storage = _layout_of(value)
    attributes = dict(storage.namespace.__get__(value) or ()) if storage.namespace is not None else {}
    for name, slot in storage.slots.items():
        try:
            attributes[name] = slot.__get__(value)
        except AttributeError:  # the slot is empty
            continue
    return attributes


def write(value: Any, name: str, item: Any) -> None:
    """Set an attribute of an object, frozen dataclasses included, without running its class's ``__setattr__``."""
    storage = _layout_of(value)
    if name in storage.slots:
        storage.slots[name].__set__(value, item)
    else:
        storage.namespace.__get__(value)[name] = item


def remove(value: Any, name: str) -> None:
    """Delete an attribute of an object, without running its class's ``__delattr__``."""
    storage = _layout_of(value)
    if name in storage.slots:
        storage.slots[name].__delete__(value)
    else:
        del storage.namespace.__get__(value)[name]


def put_back(value: Any, before: dict[str, Any]) -> None:
    """Restore the attributes that :func:`read` returned; unchanged ones are not written to."""
    now = read(value)
    for name in now.keys() - before.keys():
        remove(value, name)
    for name, item in before.items():
        if name not in now or now[name] is not item:
            write(value, name, item)


def is_looked_into(kind: type) -> bool:
    """Return whether the attributes of a class's objects are read and restored; the items of containers always are."""
    storage = layout(kind)
    return not storage.left_alone and (storage.namespace is not None or bool(storage.slots))


def has_life(values: list[Any]) -> bool:
    """Return whether an object with these attributes uses threads or files: then its data must not be put back."""
    return any(map(_is_live, set(map(type, values))))


@functools.lru_cache(maxsize=1024)
def _is_live(kind: type) -> bool:
    return str(kind.__module__).partition(".")[0] in _MODULES_OF_LIVE_OBJECTS or issubclass(kind, io.IOBase)


def passed_on(value: Any) -> tuple[Any, ...]:
    """Return the objects that a call of a bound method or ``functools.partial`` passes on; none for other values."""
    kind = type(value)
    if kind in _BOUND:
        return (value.__self__,)
    if issubclass(kind, functools.partial):
        return tuple(vars(functools.partial)[name].__get__(value) for name in ("func", "args", "keywords"))
    return ()


def is_data(value: Any) -> bool:
    """Return whether an object is of a class that is left alone, but holds only data, no threads or files."""
    if not _layout_of(value).left_alone or issubclass(type(value), _NEVER):
        return False
    namespace = getattr(value, "__dict__", None)
    return type(namespace) is dict and all(isinstance(item, _DATA) or is_array(item) for item in namespace.values())


def is_array(value: Any) -> bool:
    """Return whether a value is a numpy array."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def generator_types() -> tuple[type, ...]:
    """Return the classes of random generators."""
    numpy = sys.modules.get("numpy")
    numpy_types = (numpy.random.RandomState, numpy.random.Generator, numpy.random.BitGenerator) if numpy else ()
    return (torch.Generator, random.Random, *numpy_types)


def generator_state(generator: Any) -> Any:
    """Return the state of a random generator of torch, Python or numpy."""
    if isinstance(generator, random.Random):
        return random.Random.getstate(generator)
    if hasattr(generator, "get_state"):
        return generator.get_state()
    return getattr(generator, "bit_generator", generator).state


def set_generator_state(generator: Any, state: Any) -> None:
    """Set the state of a random generator of torch, Python or numpy."""
    if isinstance(generator, random.Random):
        random.Random.setstate(generator, state)
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        getattr(generator, "bit_generator", generator).state = state


def base_of(container: Any) -> Any:
    """Return the built-in class of a container: its methods run no code of the container's own class."""
    kind = type(container)
    return _BASES.get(kind) or next(base for base in _BASES if issubclass(kind, base))


def refill(container: Any, contents: list[Any]) -> None:
    """Restore the contents of a container, for a dict its items; unchanged containers are not written to."""
    base = base_of(container)
    if issubclass(base, dict):
        now = list(base.items(container))
        if len(now) != len(contents) or any(
            a is not c or b is not d for (a, b), (c, d) in zip(now, contents, strict=True)
        ):
            base.clear(container)
            for key, value in contents:
                base.__setitem__(container, key, value)
    elif base is set:
        if not set.__eq__(container, set(contents)):
            set.clear(container)
            set.update(container, contents)
    else:
        now = list(base.__iter__(container))
        if len(now) != len(contents) or any(a is not b for a, b in zip(now, contents, strict=True)):
            base.clear(container)
            base.extend(container, contents)
