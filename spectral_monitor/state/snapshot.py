"""Snapshots of everything that a forward may change: taken before it, restored after it."""

from __future__ import annotations

import io
import operator
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from spectral_monitor.state import objects
from spectral_monitor.state.buffers import kept
from spectral_monitor.state.dtensor import is_distributed, local_part, local_tensor
from spectral_monitor.state.module_tables import HOOKS, ModuleAttributes, NewHookRemoval, Tables

MAX_ITEMS = 10_000
"""Containers of more items are restored, but their items are not looked into."""


@contextmanager
def preserved(*roots: object, host: bool = False) -> Iterator[None]:
    """Restore modules and other objects afterwards, whatever is changed inside: see :class:`Snapshot`.

    Raises:
        Exception: an object could not be read; then nothing was run inside.
    """
    state = Snapshot(*roots, host=host)
    if state.read_error is not None:  # the code inside might change what was not recorded
        raise state.read_error
    try:
        yield
    finally:
        state.restore()


@contextmanager
def in_place_of_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the forward of a module inside."""
    attributes = vars(module)
    before = {key: attributes[key] for key in ("forward",) if key in attributes}
    attributes["forward"] = forward
    try:
        yield
    finally:
        del attributes["forward"]
        attributes.update(before)


def has_memory(tensor: Tensor) -> bool:
    """Return whether all entries of a tensor lie in allocated memory.

    FSDP frees gathered weights. Views of them, which recurrent layers keep, must not be read then.
    """
    if tensor.layout != torch.strided or tensor.numel() == 0:
        return True
    part = local_tensor(tensor)
    last = part.storage_offset() + sum((size - 1) * step for size, step in zip(part.shape, part.stride(), strict=True))
    try:
        return (last + 1) * part.element_size() <= part.untyped_storage().nbytes()
    except NotImplementedError:  # a wrapper around other tensors, as in a transform of torch.func
        return True


def is_state(tensor: Tensor, weights: bool) -> bool:
    """Return whether a forward may read or change a tensor's values; trained ones count with ``weights`` only."""
    owner = tensor._base if tensor._is_view() and tensor._base is not None else tensor
    trained = isinstance(owner, nn.Parameter) or (owner.is_leaf and owner.requires_grad)
    # An inference tensor (a metric's state after validation) cannot be changed by a training forward.
    fixed = tensor.is_inference() or tensor.is_meta or is_lazy(tensor) or not has_memory(tensor)
    return not fixed and (weights or not trained)


class Snapshot:
    """The contents of modules and other objects.

    A snapshot covers parameters, buffers, flags and everything that can be reached through attributes, slots,
    containers, bound methods and ``functools.partial``: tensors, numbers, lists and dicts, modules that are not
    registered, private random generators, objects, hooks. It leaves alone functions, classes, and objects of Python's
    own library, of torch and of loggers, unless they hold only data. Of an object that holds a lock, a thread or a
    file it covers the random generators only.

    A copy of a snapshot, deep or pickled, restores copies of the objects that were copied with it. So a snapshot holds
    no closures.

    Args:
        roots: modules, containers, tensors.
        weights: whether to cover trained tensors. Without them the snapshot is the state that a forward starts from
            besides its weights. Each :meth:`restore` then also removes the hooks that were added before the first one:
            a forward that registers hooks if it finds none would register them twice. Hooks that are added later stay.
        host: keep copies of tensors in host memory.

    Attributes:
        iterators: types of the iterators that were found; a forward would use them up.
        refused: objects that cannot be restored, each with the reason; code that may change them must not be rerun.
        read_error: the first error in reading an object, which is therefore not covered.
    """

    @torch.inference_mode(False)
    def __init__(self, *roots: object, weights: bool = True, host: bool = False) -> None:
        self._weights = weights
        self._host = host
        self._tensors: list[_TensorState] = []
        self._tables = Tables()
        self._hooks = self._tables if weights else NewHookRemoval()
        self._undo: list[Callable[[], None]] = [self._tables] if weights else [self._tables, self._hooks]
        self.iterators: list[str] = []
        self.refused: list[str] = []
        self.read_error: Exception | None = None
        self._generators = objects.generator_types()
        self._objects = 0
        visited: set[int] = set()
        # Breadth first, so that the depth of an object is the length of the shortest path to it.
        queue: deque[tuple[object, int]] = deque((root, 0) for root in roots)
        while queue:
            value, depth = queue.popleft()
            if id(value) not in visited:
                visited.add(id(value))
                next_depth = 1 if issubclass(type(value), nn.Module) else depth + 1
                references = self._record_safely(value, depth)
                queue.extend([(x, next_depth) for x in references if id(type(x)) not in objects.ATOMS])

    def _record_safely(self, value: object, depth: int) -> Iterable[Any]:
        """Record one object; return the objects that it refers to. An error costs the replay, not the training."""
        try:
            return self._record(value, type(value), depth)
        except Exception as error:
            # A traceback would keep the objects of the stack alive.
            self.read_error = self.read_error or error.with_traceback(None)
            self._refuse(value, f"it cannot be read ({type(error).__name__}: {error})")
            return ()

    def _refuse(self, value: object, reason: str) -> None:
        self.refused.append(f"the state of a {type(value).__name__} cannot be put back: {reason}")

    def _record(self, value: Any, kind: type, depth: int) -> Iterable[Any]:
        if issubclass(kind, Tensor):
            if is_state(value, self._weights):
                self._tensors.append(_TensorState(value, self._host))
        elif issubclass(kind, nn.Module):
            return self._module(value)
        elif issubclass(kind, objects.CONTAINERS):
            items = self._container(value)
            return [*items, *self._object(value, kind, depth)] if kind not in objects.CONTAINERS else items
        elif issubclass(kind, (tuple, frozenset)):
            return value if kind in (tuple, frozenset) else [*value, *self._object(value, kind, depth)]
        elif issubclass(kind, self._generators):
            state = objects.generator_state(value)
            self._undo.append(partial(objects.set_generator_state, value, state))
            return self._object(value, kind, depth)
        elif objects.is_array(value):
            if value.flags.writeable and not value.dtype.hasobject:
                self._undo.append(partial(operator.setitem, value, ..., value.copy()))
        elif kind in (bytearray, array):
            self._undo.append(partial(operator.setitem, value, slice(None), value[:]))
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
        """Record the attributes of an object; return their values."""
        if not objects.is_looked_into(kind):
            return []
        self._objects += 1
        if depth > objects.MAX_DEPTH:
            self._refuse(value, f"it is more than {objects.MAX_DEPTH} steps away")
            return []
        if self._objects > objects.MAX_OBJECTS:
            if self._objects == objects.MAX_OBJECTS + 1:  # reported once
                self._refuse(value, f"it is one of more than {objects.MAX_OBJECTS}")
            return []
        before = objects.read(value)
        values = list(before.values())
        if objects.has_life(values):
            return [item for item in values if issubclass(type(item), self._generators)]
        self._undo.append(partial(objects.put_back, value, before))
        return values

    def _module(self, module: nn.Module) -> list[Any]:
        namespace, attributes = vars(module), ModuleAttributes(module)
        self._undo.append(attributes)
        self._hooks.add(namespace[key] for key in HOOKS if key in namespace)
        restored = ("_parameters", "_buffers", "_modules") if self._weights else ("_buffers",)
        self._tables.add(namespace[key] for key in restored if isinstance(namespace.get(key), dict))  # not TorchScript
        read = restored if self._weights else (*restored, "_modules")
        members = (namespace[key].values() for key in read if key in namespace)
        return [*attributes.before.values(), *chain.from_iterable(members)]

    def _container(self, container: Any) -> list[Any]:
        """Record the items of a container; return its values, unless they are too many to be looked into."""
        base = objects.base_of(container)
        contents = list(base.items(container) if issubclass(base, dict) else base.__iter__(container))
        self._undo.append(partial(objects.refill, container, contents))
        if len(contents) > MAX_ITEMS:
            return []
        return [value for _, value in contents] if issubclass(base, dict) else contents

    @torch.no_grad()
    def restore(self) -> None:
        """Restore everything; what did not change is not written to.

        Do not call it between a forward and its backward pass, which needs the versions of tensors unchanged.
        """
        errors = []
        for undo in self._undo:
            try:
                undo()
            except Exception as error:  # the others are restored all the same
                errors.append(error)
        for state in self._tensors:
            state.reattach()
        states = [state for state in self._tensors if has_memory(state.tensor)]
        for state, changed in zip(states, _changed(states), strict=True):
            if changed:
                target = local_part(state.tensor) if is_distributed(state.tensor) else state.tensor
                target.copy_(state.values, non_blocking=True)
        if errors:
            raise errors[0]


class _TensorState:
    """A tensor with the memory, the values and the gradient that it had."""

    def __init__(self, tensor: Tensor, host: bool) -> None:
        self.tensor = tensor
        self.version = tensor._version
        self.memory = tensor.data
        self.values = kept(local_part(tensor), host)
        self.trained = tensor.is_leaf and tensor.requires_grad
        self.grad = tensor.grad if self.trained else None

    def reattach(self) -> None:
        """Undo ``tensor.data = other`` and ``tensor.grad = other``."""
        tensor, memory = self.tensor, self.memory
        if tensor.layout == torch.strided and (tensor.shape != memory.shape or tensor.data_ptr() != memory.data_ptr()):
            tensor.data = memory
        if self.trained and tensor.grad is not self.grad:
            tensor.grad = self.grad


def _changed(states: list[_TensorState]) -> list[bool]:
    """Return for each tensor whether it may differ from its copy.

    A new version proves a change, but the same version proves nothing: batch normalization and writes through ``.data``
    do not count. So values are compared. To compare on an accelerator would mean to wait for it, so all of its tensors
    count as changed: restoring an unchanged tensor does no harm.
    """
    return [state.tensor._version != state.version or _differs(state) for state in states]


def _differs(state: _TensorState) -> bool:
    if state.tensor.layout != torch.strided:
        return False
    if state.tensor.device.type != "cpu" and 0 not in state.tensor.stride():
        return True
    now = local_part(state.tensor)
    return not torch.equal(*_as_integers(now, state.values.to(now.device)))


def _as_integers(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return two tensors as integers of the same bits if both are contiguous.

    NaN then equals itself, and the comparison takes a quarter of the time.
    """
    width = torch.int64.itemsize
    plain = all(type(x) is Tensor and not (x.is_quantized or x.is_conj() or x.is_neg()) for x in (first, second))
    if plain and all(x.is_contiguous() and x.nbytes % width == x.data_ptr() % width == 0 for x in (first, second)):
        return first.view(-1).view(torch.int64), second.view(-1).view(torch.int64)
    if first.is_floating_point() and first.element_size() == 1:  # 8-bit floats have no comparison
        return first.view(torch.uint8), second.view(torch.uint8)
    return first, second
