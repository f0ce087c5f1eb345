"""Leaving no trace: what a forward may change, remembered before it and put back after it."""

from __future__ import annotations

import io
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from spectral_monitor.state.buffers import kept
from spectral_monitor.state.dtensor import is_distributed, local_part

LARGE = 10_000
"""Containers of more items are put back, but their items not looked into."""


_CONTAINERS = (list, dict, set, deque)
_DATA = (bool, int, float, complex, str, bytes, type(None), Tensor, tuple, *_CONTAINERS)
_TORCH_OWN = frozenset(key for key in vars(nn.Module()) if key != "training")
_TABLES = ("_parameters", "_buffers", "_modules")
_HOOKS = tuple(key for key in _TORCH_OWN if key.startswith(("_forward_", "_backward_")))


@contextmanager
def preserved(*roots: object, host: bool = False) -> Iterator[None]:
    """Inside, modules may change what they hold; afterwards all is as it was: see :class:`Snapshot`."""
    state = Snapshot(*roots, host=host)
    try:
        yield
    finally:
        state.restore()


def _generator_state(generator: Any) -> Any:
    """Return the state of a random generator of torch, Python or numpy."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state()


def _set_generator_state(generator: Any, state: Any) -> None:
    """Undo what happened to a generator since it was in ``state``."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _generator_types() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy")
    return (torch.Generator, random.Random, *((numpy.random.RandomState, numpy.random.Generator) if numpy else ()))


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def has_memory(tensor: Tensor) -> bool:
    """Return whether there is memory behind all of a tensor: FSDP frees gathered weights, and views of them, as
    recurrent layers keep, must not be read.
    """
    if tensor.layout != torch.strided or tensor.numel() == 0:
        return True
    here = local_part(tensor)
    last = here.storage_offset() + sum((size - 1) * step for size, step in zip(here.shape, here.stride(), strict=True))
    try:
        return (last + 1) * here.element_size() <= here.untyped_storage().nbytes()
    except NotImplementedError:  # it stands for other tensors, as in a transform of torch.func
        return True


def is_state(tensor: Tensor, weights: bool) -> bool:
    """Return whether a forward may start from what a tensor holds, or change it; ``weights``: trained ones too."""
    owner = tensor._base if tensor._is_view() and tensor._base is not None else tensor
    trained = isinstance(owner, nn.Parameter) or (owner.is_leaf and owner.requires_grad)
    # An inference tensor (a metric's state after validation) cannot be changed by a training forward.
    without = tensor.is_inference() or tensor.is_meta or is_lazy(tensor) or not has_memory(tensor)
    return not without and (weights or not trained)


class Snapshot:
    """The contents of some modules and other objects.

    Covered are parameters, buffers, flags and everything reached through attributes and containers: tensors, numbers,
    lists and dicts, modules that hide there, private random generators, objects that hold nothing but data, hooks.

    Args:
        roots: modules, containers, tensors.
        weights: without them only what is not trained: the state a forward starts from besides its weights. Hooks
            are then taken away that were added before the state is first put back: a forward that registers hooks
            when it finds none would register them twice. All others stay.
        host: keep copies of tensors in host memory.
    """

    @torch.inference_mode(False)
    def __init__(self, *roots: object, weights: bool = True, host: bool = False) -> None:
        self._weights = weights
        self._host = host
        self._tensors: list[_TensorState] = []
        self._undo: list[Callable[[], None]] = []
        self.iterators: list[str] = []
        self._generators = _generator_types()
        seen: set[int] = set()
        open_ends: list[object] = list(roots)
        while open_ends:
            value = open_ends.pop()
            if id(value) not in seen and not isinstance(value, (int, float, str, type(None))):
                seen.add(id(value))
                open_ends.extend(self._take(value))

    def _take(self, value: Any) -> Any:
        """Remember one object; what it refers to."""
        if isinstance(value, Tensor):
            if is_state(value, self._weights):
                self._tensors.append(_TensorState(value, self._host))
        elif isinstance(value, nn.Module):
            return self._module(value)
        elif isinstance(value, _CONTAINERS):
            return self._container(value)
        elif isinstance(value, tuple):
            return value
        elif type(value) in self._generators:
            state = _generator_state(value)
            self._undo.append(lambda: _set_generator_state(value, state))
        elif _is_array(value):
            if value.flags.writeable and not value.dtype.hasobject:
                copied = value.copy()
                self._undo.append(lambda: value.__setitem__(..., copied))
        elif isinstance(value, Iterator):
            if not isinstance(value, io.IOBase):
                self.iterators.append(type(value).__name__)
        elif _is_data(value):
            return self._container(vars(value))
        return ()

    def _module(self, module: nn.Module) -> list[Any]:
        space = vars(module)
        weights, wrapper = frozenset(space.get("_parameters", ())), _is_fsdp1(module)

        def users(key: str) -> bool:
            # FSDP1 sets itself up in the first forward. Inside its forwards the whole weights are attributes too.
            return key == "training" if wrapper else key not in _TORCH_OWN and key not in weights

        plain = {key: value for key, value in space.items() if users(key)}

        def undo() -> None:
            for key in [key for key in space if key not in plain and users(key)]:
                del space[key]
            # What is a parameter by now (pruning that was made to last) would be hidden by an attribute of its name.
            back = {key: value for key, value in plain.items() if key not in module._parameters}
            space.update({key: value for key, value in back.items() if space.get(key, module) is not value})

        self._undo.append(undo)
        own = (*module.buffers(recurse=False), *module.children())
        own = (*module.parameters(recurse=False), *own) if self._weights else own
        tables = _TABLES if self._weights else ("_buffers",)
        hooks = [space[key] for key in _HOOKS if key in space]
        self._undo.append(_Refilled(hooks) if self._weights else _WithoutNew(hooks))
        return [*plain.values(), *own, *(space.get(table) for table in tables)]

    def _container(self, box: Any) -> list[Any]:
        if isinstance(box, dict):
            pairs = list(box.items())
            self._undo.append(lambda: _refill(box, pairs))
            return [value for _, value in pairs] if len(pairs) <= LARGE else []
        content = list(box)
        self._undo.append(lambda: _refill(box, content))
        return content if len(content) <= LARGE else []

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back; what did not change is not written to.

        Not to be called between a forward and its backward pass, which needs the tensors' versions unchanged.
        """
        for undo in self._undo:
            undo()
        for state in self._tensors:
            state.reattach()
        states = [state for state in self._tensors if has_memory(state.tensor)]
        for state, changed in zip(states, _changed(states), strict=True):
            if changed:
                target = local_part(state.tensor) if is_distributed(state.tensor) else state.tensor
                target.copy_(state.copied, non_blocking=True)


class _TensorState:
    """A tensor, the memory it lay in, what lay there, and its gradient."""

    def __init__(self, tensor: Tensor, host: bool) -> None:
        self.tensor = tensor
        self.version = tensor._version
        self.memory = tensor.data
        self.copied = kept(local_part(tensor), host)
        self.trained = tensor.is_leaf and tensor.requires_grad
        self.grad = tensor.grad if self.trained else None

    def reattach(self) -> None:
        """Undo ``tensor.data = other`` and ``tensor.grad = other``."""
        tensor, memory = self.tensor, self.memory
        if tensor.layout == torch.strided and (tensor.shape != memory.shape or tensor.data_ptr() != memory.data_ptr()):
            tensor.data = memory
        if self.trained and tensor.grad is not self.grad:
            tensor.grad = self.grad


class _Refilled:
    """Gives some hook tables back what they held when it was made."""

    def __init__(self, tables: list[dict[int, Any]]) -> None:
        self._tables = [(table, list(table.items())) for table in tables]

    def __call__(self) -> None:
        for table, pairs in self._tables:
            _refill(table, pairs)


class _WithoutNew:
    """Takes away what was added to some hook tables between its making and its first call."""

    def __init__(self, tables: list[dict[int, Any]]) -> None:
        self._tables = [(table, set(table)) for table in tables]
        self._new: list[tuple[dict[int, Any], int]] | None = None

    def __call__(self) -> None:
        if self._new is None:
            self._new = [(table, key) for table, known in self._tables for key in table if key not in known]
        for table, key in self._new:
            table.pop(key, None)


def _changed(states: list[_TensorState]) -> list[bool]:
    """Return the tensors that may differ from their copies.

    A version that moved says so for sure, but one that did not says nothing: batch normalization and whatever writes
    through ``.data`` leave no mark. So tensors are compared; where that would mean to wait for a device, all its
    tensors are taken for changed: what is written to them is what they hold.
    """
    return [state.tensor._version != state.version or _differs(state) for state in states]


def _differs(state: _TensorState) -> bool:
    if state.tensor.layout != torch.strided:
        return False
    if state.tensor.device.type != "cpu" and 0 not in state.tensor.stride():
        return True
    now = local_part(state.tensor)
    return not torch.equal(_comparable(now), _comparable(state.copied.to(now.device)))


def _comparable(tensor: Tensor) -> Tensor:
    """Floats of eight bits cannot be compared as such."""
    eight = tensor.is_floating_point() and tensor.element_size() == 1
    return tensor.view(torch.uint8) if eight else tensor


def _refill(box: Any, content: list[Any]) -> None:
    """Give a container its old content back, if that changed."""
    if isinstance(box, dict):
        now = list(box.items())
        if len(now) != len(content) or any(
            a is not c or b is not d for (a, b), (c, d) in zip(now, content, strict=True)
        ):
            box.clear()
            for key, value in content:  # not update(), which counts in a Counter
                box[key] = value
    elif isinstance(box, set):
        if box != set(content):
            box.clear()
            box.update(content)
    elif len(box) != len(content) or any(a is not b for a, b in zip(box, content, strict=True)):
        box.clear()
        box.extend(content)


def _is_fsdp1(module: nn.Module) -> bool:
    """Return whether it is a wrapper that shards its parameters and keeps track of that in attributes."""
    wrapper = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    return wrapper is not None and isinstance(module, wrapper)


def _is_data(value: Any) -> bool:
    """Return whether a user's object holds nothing but data (a running average, a state), no threads or files."""
    if isinstance(value, (type, types.ModuleType, types.FunctionType, types.MethodType, Optimizer)):
        return False
    space = getattr(value, "__dict__", None)
    return type(space) is dict and all(isinstance(item, _DATA) or _is_array(item) for item in space.values())
