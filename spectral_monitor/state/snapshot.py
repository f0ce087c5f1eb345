"""Leaving no trace: what a forward may change, remembered before it and put back after it."""

from __future__ import annotations

import io
import operator
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from spectral_monitor.state import objects
from spectral_monitor.state.buffers import kept
from spectral_monitor.state.dtensor import is_distributed, local_part

MAX_ITEMS = 10_000
"""Containers of more items are put back, but their items not looked into."""


_TORCH_OWN = frozenset(key for key in vars(nn.Module()) if key != "training")
_HOOKS = tuple(key for key in _TORCH_OWN if key.startswith(("_forward_", "_backward_")))


@contextmanager
def preserved(*roots: object, host: bool = False) -> Iterator[None]:
    """Inside, modules may change what they hold; afterwards all is as it was: see :class:`Snapshot`.

    Raises:
        Exception: something could not be read; then nothing was run inside.
    """
    state = Snapshot(*roots, host=host)
    if state.unread is not None:  # what happens inside might change what could not be remembered
        raise state.unread
    try:
        yield
    finally:
        state.restore()


@contextmanager
def in_place_of_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, a module's calls go to another function."""
    space = vars(module)
    before = {key: space[key] for key in ("forward",) if key in space}
    space["forward"] = forward
    try:
        yield
    finally:
        del space["forward"]
        space.update(before)


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

    Covered are parameters, buffers, flags and everything reached through attributes, slots, containers, bound methods
    and ``functools.partial``: tensors, numbers, lists and dicts, modules that hide there, private random generators,
    objects, hooks. Left alone are functions, classes, and objects of Python's own library, of torch and of loggers,
    unless these hold nothing but data. The same is true of an object that holds a lock, a thread or a file, but for its
    random generators.

    A deep copy, or an unpickled one, puts the copies of these back, if they were copied with it: nothing here is a
    closure.

    Args:
        roots: modules, containers, tensors.
        weights: without them only what is not trained: the state a forward starts from besides its weights. Hooks
            are then taken away that were added before the state is first put back: a forward that registers hooks
            when it finds none would register them twice. All others stay.
        host: keep copies of tensors in host memory.

    Attributes:
        iterators: types of iterators found, which a forward would use up.
        refused: what cannot be put back, and why; nothing that may change it must be run again.
        unread: the first error in reading something, which was not remembered then.
    """

    @torch.inference_mode(False)
    def __init__(self, *roots: object, weights: bool = True, host: bool = False) -> None:
        self._weights = weights
        self._host = host
        self._tensors: list[_TensorState] = []
        self._undo: list[Callable[[], None]] = []
        self.iterators: list[str] = []
        self.refused: list[str] = []
        self.unread: Exception | None = None
        self._generators = objects.generator_types()
        self._objects = 0
        seen: set[int] = set()
        # The nearest first, so that the depth of what is reached in several ways is that of the shortest.
        open_ends: deque[tuple[object, int]] = deque((root, 0) for root in roots)
        while open_ends:
            value, depth = open_ends.popleft()
            if id(value) not in seen:
                seen.add(id(value))
                below = 1 if issubclass(type(value), nn.Module) else depth + 1
                open_ends.extend([(x, below) for x in self._taken(value, depth) if id(type(x)) not in objects.ATOMS])

    def _taken(self, value: object, depth: int) -> Iterable[Any]:
        """Remember one object; return what it refers to. An error costs the replay, not the training."""
        try:
            return self._take(value, type(value), depth)
        except Exception as error:
            self.unread = self.unread or error.with_traceback(None)  # that holds what is on the stack
            self._refuse(value, f"it cannot be read ({type(error).__name__}: {error})")
            return ()

    def _refuse(self, value: object, why: str) -> None:
        self.refused.append(f"the state of a {type(value).__name__} cannot be put back: {why}")

    def _take(self, value: Any, kind: type, depth: int) -> Iterable[Any]:
        if issubclass(kind, Tensor):
            if is_state(value, self._weights):
                self._tensors.append(_TensorState(value, self._host))
        elif issubclass(kind, nn.Module):
            return self._module(value)
        elif issubclass(kind, objects.CONTAINERS):
            content = self._container(value)
            return [*content, *self._object(value, kind, depth)] if kind not in objects.CONTAINERS else content
        elif issubclass(kind, (tuple, frozenset)):
            return value if kind in (tuple, frozenset) else [*value, *self._object(value, kind, depth)]
        elif issubclass(kind, self._generators):
            state = objects.generator_state(value)
            self._undo.append(partial(objects.set_generator_state, value, state))
            return self._object(value, kind, depth)
        elif objects.is_array(value):
            if value.flags.writeable and not value.dtype.hasobject:
                copied = value.copy()
                self._undo.append(partial(operator.setitem, value, ..., copied))
        elif kind in (bytearray, array):
            entries = value[:]
            self._undo.append(partial(operator.setitem, value, slice(None), entries))
        elif issubclass(kind, Iterator):
            if not issubclass(kind, io.IOBase):
                self.iterators.append(kind.__name__)
        elif objects.is_looked_into(kind) or objects.passed_on(value):
            return [*objects.passed_on(value), *self._object(value, kind, depth)]
        elif objects.is_data(value):
            before = objects.read(value)
            self._undo.append(partial(objects.put_back, value, before))
            return before.values()
        return ()

    def _object(self, value: Any, kind: type, depth: int) -> list[Any]:
        """Remember the attributes of an object; return their values."""
        if not objects.is_looked_into(kind):
            return []
        self._objects += 1
        if depth > objects.MAX_DEPTH:
            self._refuse(value, f"it is more than {objects.MAX_DEPTH} steps away")
            return []
        if self._objects > objects.MAX_OBJECTS:
            if self._objects == objects.MAX_OBJECTS + 1:  # said once
                self._refuse(value, f"it is one of more than {objects.MAX_OBJECTS}")
            return []
        before = objects.read(value)
        held = list(before.values())
        if objects.has_life(held):
            return [item for item in held if issubclass(type(item), self._generators)]
        self._undo.append(partial(objects.put_back, value, before))
        return held

    def _module(self, module: nn.Module) -> list[Any]:
        space, attributes = vars(module), _ModuleAttributes(module)
        self._undo.append(attributes)
        hooks = [space[key] for key in _HOOKS if key in space]
        own = [*module.buffers(recurse=False), *module.children(), space.get("_buffers")]
        if self._weights:
            own = [*module.parameters(recurse=False), *own, space.get("_parameters"), space.get("_modules")]
            for hook_table in hooks:
                self._container(hook_table)
        else:
            self._undo.append(_WithoutNew(hooks))
        return [*attributes.before.values(), *own]

    def _container(self, box: Any) -> list[Any]:
        base = objects.base_of(box)
        content = list(base.items(box) if issubclass(base, dict) else base.__iter__(box))
        self._undo.append(partial(objects.refill, box, content))
        if len(content) > MAX_ITEMS:
            return []
        return [value for _, value in content] if issubclass(base, dict) else content

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back; what did not change is not written to.

        Not to be called between a forward and its backward pass, which needs the tensors' versions unchanged.
        """
        errors = []
        for undo in self._undo:
            try:
                undo()
            except Exception as error:  # the rest is put back all the same
                errors.append(error)
        for state in self._tensors:
            state.reattach()
        states = [state for state in self._tensors if has_memory(state.tensor)]
        for state, changed in zip(states, _changed(states), strict=True):
            if changed:
                target = local_part(state.tensor) if is_distributed(state.tensor) else state.tensor
                target.copy_(state.copied, non_blocking=True)
        if errors:
            raise errors[0]


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


class _ModuleAttributes:
    """The attributes of a module that are its own, not torch's, which come back when this is called."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._weights, self._wrapper = frozenset(vars(module).get("_parameters", ())), _is_fsdp1(module)
        self.before = {key: value for key, value in vars(module).items() if self._is_own(key)}

    def _is_own(self, key: str) -> bool:
        # FSDP1 sets itself up in the first forward. Inside its forwards the whole weights are attributes too.
        return key == "training" if self._wrapper else key not in _TORCH_OWN and key not in self._weights

    def __call__(self) -> None:
        """Put the attributes back; what did not change is not written to."""
        space = vars(self._module)
        for key in [key for key in space if key not in self.before and self._is_own(key)]:
            del space[key]
        # What is a parameter by now (pruning that was made to last) would be hidden by an attribute of its name.
        back = {key: value for key, value in self.before.items() if key not in self._module._parameters}
        space.update({key: value for key, value in back.items() if space.get(key, self._module) is not value})


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
    return not torch.equal(*_as_integers(now, state.copied.to(now.device)))


def _as_integers(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return two tensors as integers of the same bits where both are contiguous: NaN is then equal to itself, and
    comparing takes a quarter of the time.
    """
    width = torch.int64.itemsize
    plain = all(type(x) is Tensor and not (x.is_quantized or x.is_conj() or x.is_neg()) for x in (first, second))
    if plain and all(x.is_contiguous() and x.nbytes % width == x.data_ptr() % width == 0 for x in (first, second)):
        return first.view(-1).view(torch.int64), second.view(-1).view(torch.int64)
    if first.is_floating_point() and first.element_size() == 1:  # which cannot be compared as such
        return first.view(torch.uint8), second.view(torch.uint8)
    return first, second


def _is_fsdp1(module: nn.Module) -> bool:
    """Return whether it is a wrapper that shards its parameters and keeps track of that in attributes."""
    wrapper = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    return wrapper is not None and isinstance(module, wrapper)
