"""Registration of hooks: copies of a module do not carry them, and compiled code is not compiled again for them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

Owner = TypeVar("Owner")

Harmless = Callable[[str], AbstractContextManager[None]]
"""Name of some work -> a context for it, in which an error costs the measurement but never the step."""


class Removable(Protocol):
    """Handle of a registration."""

    def remove(self) -> None:
        """Undo the registration."""


class Hook:
    """A function to be registered as a hook, which copies and pickles of the module do not carry.

    A user may copy a model (a teacher, a running average) or save it while a step is measured. The copy would keep the
    hook for ever, with everything it refers to. Instead the copy gets a hook that does nothing, and that can be loaded
    where this package is not installed.

    Attributes:
        compiled: whether the hook was called inside compiled code.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.compiled = False

    def __call__(self, *args: Any) -> Any:
        """Return the function's result; ``None`` inside compiled code."""
        if torch.compiler.is_compiling():
            self.compiled = True  # the compiler records the assignment, and repeats it whenever the code runs
            return None
        return self.function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # takes any arguments, returns None


class Hooks(Generic[Owner]):
    """Registers hooks on modules or optimizers, but not on those that were called inside compiled code: each new hook
    would force a recompilation.

    Attributes:
        handles: of all registrations; handles that are to be removed with them may be appended.
    """

    def __init__(self) -> None:
        self.handles: list[Removable] = []
        self._compiled_earlier: set[Owner] = set()
        self._live: list[tuple[Owner, Hook]] = []

    @property
    def compiled(self) -> set[Owner]:
        """The modules or optimizers whose hooks were called inside compiled code, in this step or an earlier one."""
        return self._compiled_earlier | {owner for owner, hook in self._live if hook.compiled}

    def add(
        self, owner: Owner, register: Callable[..., Removable], function: Callable[..., Any], **options: Any
    ) -> None:
        """Register a function, unless calls of the owner are compiled.

        Args:
            owner: the module or optimizer whose calls are seen.
            register: the method of the owner, or of a part of it, that registers a hook.
        """
        if owner not in self._compiled_earlier:
            self._live.append((owner, hook := Hook(function)))
            self.handles.append(register(hook, **options))

    def add_around(self, module: Any, enter: Callable[..., Any], leave: Callable[..., Any]) -> None:
        """Register two functions around the calls of a module.

        ``enter`` comes first, to see the arguments before the user's own pre-hooks change them.
        """
        self.add(module, module.register_forward_pre_hook, enter, prepend=True, with_kwargs=True)
        self.add(module, module.register_forward_hook, leave, with_kwargs=True, always_call=True)

    def remove(self) -> None:
        """Remove all registrations and forget all hooks, but not which owners' calls are compiled."""
        while self.handles:
            self.handles.pop().remove()
        self._compiled_earlier = self.compiled
        self._live.clear()


class WrappedCall:
    """Calls functions around a module that was compiled in place, where hooks would become part of the compiled code.

    torch calls such a module through an attribute, which copies and pickles leave out. It is replaced until
    :meth:`remove`.
    """

    def __init__(self, module: nn.Module, enter: Callable[..., Any], leave: Callable[..., Any]) -> None:
        self._attributes = vars(module)
        self._compiled = compiled = self._attributes["_compiled_call_impl"]

        def call(*args: Any, **kwargs: Any) -> Any:
            output = None
            enter(module, args, kwargs)
            try:
                output = compiled(*args, **kwargs)
            finally:
                leave(module, args, kwargs, output)
            return output

        self._call = self._attributes["_compiled_call_impl"] = call

    def remove(self) -> None:
        """Restore the attribute, unless somebody else has replaced it since."""
        if self._attributes.get("_compiled_call_impl") is self._call:
            self._attributes["_compiled_call_impl"] = self._compiled


class GradientHook:
    """Calls a function where the gradient of a parameter arrives in the graph, without a change of the parameter.

    It keeps the node alive: torch would otherwise make a new one, without the hook.

    Args:
        p: a leaf that requires a gradient.
        function: called like torch's pre-hooks of nodes, before the gradient is added.
    """

    def __init__(self, p: Tensor, function: Callable[..., None]) -> None:
        self._node = node = get_gradient_edge(p).node
        self._handle = node.register_prehook(function)

    def remove(self) -> None:
        """Remove the hook."""
        self._handle.remove()


def ancestors(model: nn.Module, targets: set[int]) -> list[nn.Module]:
    """Return every module that contains a target, and the targets."""
    return [module for module in model.modules() if any(id(part) in targets for part in module.modules())]


def in_transform() -> bool:
    """Return whether ``vmap``, ``grad`` or another transform of ``torch.func`` runs this code, on wrapped tensors."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def backward_pass() -> int:
    """Return the number of the running backward pass, -1 outside one; passes that begin later have larger numbers."""
    return int(torch._C._current_graph_task_id())


def in_backward() -> bool:
    """Return whether a backward pass is running."""
    return backward_pass() != -1


def after_backward(function: Callable[[], None]) -> None:
    """Call a function when the running backward pass ends, after all functions that were queued before."""
    torch.autograd.Variable._execution_engine.queue_callback(function)
