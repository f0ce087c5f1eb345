"""Hooks that stay with the module they were registered on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

Owner = TypeVar("Owner")

Harmless = Callable[[str], AbstractContextManager[None]]
"""What is done -> to be entered around it: an error there costs the measurement, never the step."""


class Removable(Protocol):
    """Handle of a registration."""

    def remove(self) -> None:
        """Take it back."""


class Hook:
    """A function to be registered as a hook; copies and pickles of the module carry none of it.

    A user may copy a model (a teacher, a running average) or save it while a step is measured. What is registered
    then would go with it, with all it refers to, and stay on the copy for ever. Instead the copy gets a hook that
    does nothing and that can be loaded where this package is not installed.

    Attributes:
        compiled: whether it was called inside code that is compiled, of which the function is no part.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.compiled = False

    def __call__(self, *args: Any) -> Any:
        """Return what the function returns; ``None`` inside code that is compiled."""
        if torch.compiler.is_compiling():
            self.compiled = True  # the compiler notes that as well, and does it whenever that code runs
            return None
        return self.function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # takes any arguments, returns None


class Hooks(Generic[Owner]):
    """Registers hooks on modules or optimizers, but not on those that were called inside compiled code: each new hook
    there would have it compiled again.
    """

    def __init__(self) -> None:
        self._known: set[Owner] = set()
        self._live: list[tuple[Owner, Hook]] = []

    @property
    def compiled(self) -> set[Owner]:
        """Those whose hooks were called inside compiled code, in this step or an earlier one."""
        return self._known | {owner for owner, hook in self._live if hook.compiled}

    def add(
        self, owner: Owner, register: Callable[..., Removable], function: Callable[..., Any], **options: Any
    ) -> list[Removable]:
        """Register a function; return the handle, and nothing where it is not registered.

        Args:
            owner: whose calls are seen.
            register: its method that registers a hook, or that of a part of it.
            function: what the hook calls.
            options: for ``register``.
        """
        if owner in self._known:
            return []
        self._live.append((owner, hook := Hook(function)))
        return [register(hook, **options)]

    def remove(self, handles: list[Removable]) -> None:
        """Take back what handles stand for, hooks of these among them, and forget it, but not whose calls were
        compiled.
        """
        while handles:
            handles.pop().remove()
        self._known = self.compiled
        self._live.clear()


class WrappedCall:
    """Shows calls of a module that was compiled in place, where hooks would be part of what is compiled.

    Such a module is called by what torch keeps beside it, which copies and pickles of the module leave out. That is
    exchanged until :meth:`remove`.
    """

    def __init__(self, module: nn.Module, enter: Callable[..., Any], leave: Callable[..., Any]) -> None:
        self._space = vars(module)
        self._compiled = compiled = self._space["_compiled_call_impl"]

        def call(*args: Any, **kwargs: Any) -> Any:
            output = None
            enter(module, args, kwargs)
            try:
                output = compiled(*args, **kwargs)
            finally:
                leave(module, args, kwargs, output)
            return output

        self._call = self._space["_compiled_call_impl"] = call

    def remove(self) -> None:
        """Put back what was there, unless somebody else has put something there."""
        if self._space.get("_compiled_call_impl") is self._call:
            self._space["_compiled_call_impl"] = self._compiled


class GradientHook:
    """Calls a function where the gradient of a parameter arrives, in the graph: the parameter shows no trace of it.

    It keeps the node alive, which would else be made again without the hook.

    Args:
        p: a leaf that requires a gradient.
        function: is given gradients as torch's hooks on nodes are, before they are added.
    """

    def __init__(self, p: Tensor, function: Callable[..., None]) -> None:
        self._node = node = get_gradient_edge(p).node
        self._handle = node.register_prehook(function)

    def remove(self) -> None:
        """Take it back."""
        self._handle.remove()


def ancestors(model: nn.Module, targets: set[int]) -> list[nn.Module]:
    """Return every module that contains a target, and the targets."""
    return [module for module in model.modules() if any(id(part) in targets for part in module.modules())]


def in_transform() -> bool:
    """Return whether this is called inside ``vmap``, ``grad`` or another transform of ``torch.func``, where tensors
    differ from those outside.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


def backward_pass() -> int:
    """Return the number of the backward pass this is called in the middle of, -1 outside one; those that begin later,
    inside it or after it, have larger ones.
    """
    return int(torch._C._current_graph_task_id())


def in_backward() -> bool:
    """Return whether this is called in the middle of a backward pass."""
    return backward_pass() != -1


def after_backward(function: Callable[[], None]) -> None:
    """Have a function called when the backward pass this is called in ends, after all that was asked for before."""
    torch.autograd.Variable._execution_engine.queue_callback(function)
