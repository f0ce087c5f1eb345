"""Hooks right before and right after an optimizer's update, whatever loop runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.optim import Optimizer

from spectral_monitor.capture.hooks.registration import Hooks, Removable

Moment = Callable[[Optimizer], None]
Closure = Callable[..., Any]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]

STEPPED_AGAIN = (
    "an optimizer stepped more than once in what was measured as one step: updates, gradients and learning rates are "
    "those of its last step. In a loop of your own, give each of its steps a probe.step() of its own"
)


class OptimizerCapture:
    """Hooks on optimizers, there only while armed.

    * ``before``: the last moment before the optimizer may change a weight. One of torch's that is given a closure,
      with forward and backward inside, runs that first, so the moment is when the closure has returned for the first
      time; one of another origin (sharpness-aware minimization) may move the weights before it runs the closure, so
      the moment is the start of its step, at the price of holding a copy during the forward.
    * ``ready``: the gradients are final, those of the closure's first call.
    * ``enter``: right before the closure's first call.
    * ``after``: the step is done.

    A step may call another one: a subclass its parent's, a wrapper that of the optimizer it holds in an attribute.
    Only the outermost counts, and it counts for the wrapper. A step that is compiled is not seen. It is compiled once
    more for these hooks, which do nothing there and are not registered again.

    Attributes:
        closure_calls: optimizer's id -> how often its step, the latest one, has run its closure.
        repeated: whether an optimizer began a step after another one, since the hooks were registered.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], enter: Moment, before: Moment, ready: Moment, after: Moment
    ) -> None:
        self.optimizers = tuple(optimizers)
        self._on_enter = enter
        self._before = before
        self._ready = ready
        self._after = after
        self._handles: list[Removable] = []
        self._hooks: Hooks[Optimizer] = Hooks()
        self._depth: dict[int, int] = {}
        self._held: set[int] = set()
        self._seen: set[int] = set()
        self.closure_calls: dict[int, int] = {}
        self.repeated = False

    @property
    def compiled(self) -> set[Optimizer]:
        """Those whose steps are compiled, and so cannot be seen."""
        return self._hooks.compiled

    def arm(self) -> None:
        """Register the hooks."""
        self._depth.clear()
        self._held.clear()
        self._seen.clear()
        self.closure_calls.clear()
        self.repeated = False
        for optimizer in self.optimizers:
            for part in (optimizer, *_inner(optimizer)):
                enter, leave = partial(self._enter, optimizer), partial(self._leave, optimizer)
                self._handles += self._hooks.add(optimizer, part.register_step_pre_hook, enter)
                self._handles += self._hooks.add(optimizer, part.register_step_post_hook, leave)

    def disarm(self) -> None:
        """Remove the hooks; safe to call at any time."""
        self._hooks.remove(self._handles)

    def _enter(self, optimizer: Optimizer, _: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        key = id(optimizer)
        self._depth[key] = self._depth.get(key, 0) + 1
        if self._depth[key] > 1:
            return None
        self.repeated |= key in self.closure_calls
        self._held.discard(key)
        self._seen.discard(key)
        self.closure_calls[key] = 0
        replaced = with_closure(args, kwargs, partial(self._watched, optimizer))
        if replaced is None:
            self._gradients_final(optimizer)
        elif not type(optimizer).__module__.startswith("torch.optim"):
            self._hold(optimizer)
        return replaced

    def _watched(self, optimizer: Optimizer, closure: Closure) -> Closure:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if not self.closure_calls[id(optimizer)]:
                self._on_enter(optimizer)
            result = closure(*args, **kwargs)
            self.closure_calls[id(optimizer)] += 1
            self._gradients_final(optimizer)
            return result

        return watched

    def _hold(self, optimizer: Optimizer) -> None:
        if id(optimizer) not in self._held:
            self._held.add(id(optimizer))
            self._before(optimizer)

    def _gradients_final(self, optimizer: Optimizer) -> None:
        if id(optimizer) not in self._seen:
            self._seen.add(id(optimizer))
            self._hold(optimizer)
            self._ready(optimizer)

    def _leave(self, optimizer: Optimizer, _: Optimizer, args: Any, kwargs: Any) -> None:
        key = id(optimizer)
        self._depth[key] = self._depth.get(key, 1) - 1
        if self._depth[key] == 0 and key in self._seen:
            self._after(optimizer)


def _inner(optimizer: Optimizer) -> list[Optimizer]:
    """Optimizers a wrapper holds, which its user may step themselves."""
    return [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]


def with_closure(args: tuple[Any, ...], kwargs: dict[str, Any], wrap: Callable[[Closure], Closure]) -> Arguments | None:
    """Return the arguments of a step with another closure, made of the one there is, wherever it stands; ``None`` if
    there is none.

    Example:
        >>> args, kwargs = with_closure((), {"closure": lambda: 1}, lambda closure: lambda: closure() + 1)
        >>> kwargs["closure"]()
        2
    """
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": wrap(kwargs["closure"])}
    place = next((i for i, arg in enumerate(args) if callable(arg)), None)
    if place is None:
        return None
    return (*args[:place], wrap(args[place]), *args[place + 1 :]), kwargs
