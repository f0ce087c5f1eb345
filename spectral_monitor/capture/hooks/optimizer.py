"""Hooks right before and right after an optimizer's update, whichever loop runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.optim import Optimizer

from spectral_monitor.capture.hooks.registration import Hooks

Moment = Callable[[Optimizer], None]
Closure = Callable[..., Any]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]

STEPPED_AGAIN = (
    "an optimizer stepped more than once in one measured step: updates, gradients and learning rates are those of its "
    "last step. In a loop of your own, put each optimizer step into its own `with probe.step():`"
)


class OptimizerCapture:
    """Hooks on optimizers, registered only while armed.

    * ``before``: the last moment before the optimizer may change a weight. An optimizer of torch's runs its closure,
      with forward and backward inside, before that; so the moment is the end of the closure's first call. Any other
      one (sharpness-aware minimization) may change weights before it runs the closure; so the moment is the start of
      its step, and a copy is held during the forward.
    * ``ready``: the gradients are final, those of the closure's first call.
    * ``enter``: right before the closure's first call.
    * ``after``: the step is done.

    A step may call another one: of a parent class, or of an optimizer that a wrapper holds in an attribute. Only the
    outermost step counts, as one of the wrapper. A compiled step is not seen. The hooks make torch compile it once
    more; they do nothing there, and are not registered again.

    Attributes:
        closure_calls: id of an optimizer -> number of closure calls in its latest step.
        repeated: whether an optimizer began more than one step since the hooks were registered.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], enter: Moment, before: Moment, ready: Moment, after: Moment
    ) -> None:
        self.optimizers = tuple(optimizers)
        self._on_enter = enter
        self._before = before
        self._ready = ready
        self._after = after
        self._hooks: Hooks[Optimizer] = Hooks()
        self._depth: dict[int, int] = {}
        self._before_called: set[int] = set()
        self._ready_called: set[int] = set()
        self.closure_calls: dict[int, int] = {}
        self.repeated = False

    @property
    def compiled(self) -> set[Optimizer]:
        """Optimizers whose steps are compiled and therefore not seen."""
        return self._hooks.compiled

    def arm(self) -> None:
        """Register the hooks."""
        self._depth.clear()
        self._before_called.clear()
        self._ready_called.clear()
        self.closure_calls.clear()
        self.repeated = False
        for optimizer in self.optimizers:
            for part in (optimizer, *_inner(optimizer)):
                enter, leave = partial(self._enter, optimizer), partial(self._leave, optimizer)
                self._hooks.add(optimizer, part.register_step_pre_hook, enter)
                self._hooks.add(optimizer, part.register_step_post_hook, leave)

    def disarm(self) -> None:
        """Remove the hooks; safe to call at any time."""
        self._hooks.remove()

    def _enter(self, optimizer: Optimizer, _: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        key = id(optimizer)
        self._depth[key] = self._depth.get(key, 0) + 1
        if self._depth[key] > 1:
            return None
        self.repeated |= key in self.closure_calls
        self._before_called.discard(key)
        self._ready_called.discard(key)
        self.closure_calls[key] = 0
        arguments = with_closure(args, kwargs, partial(self._watched, optimizer))
        if arguments is None:
            self._call_ready(optimizer)
        elif not type(optimizer).__module__.startswith("torch.optim"):
            self._call_before(optimizer)
        return arguments

    def _watched(self, optimizer: Optimizer, closure: Closure) -> Closure:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if not self.closure_calls[id(optimizer)]:
                self._on_enter(optimizer)
            result = closure(*args, **kwargs)
            self.closure_calls[id(optimizer)] += 1
            self._call_ready(optimizer)
            return result

        return watched

    def _call_before(self, optimizer: Optimizer) -> None:
        if id(optimizer) not in self._before_called:
            self._before_called.add(id(optimizer))
            self._before(optimizer)

    def _call_ready(self, optimizer: Optimizer) -> None:
        if id(optimizer) not in self._ready_called:
            self._ready_called.add(id(optimizer))
            self._call_before(optimizer)
            self._ready(optimizer)

    def _leave(self, optimizer: Optimizer, _: Optimizer, args: Any, kwargs: Any) -> None:
        key = id(optimizer)
        self._depth[key] = self._depth.get(key, 1) - 1
        if self._depth[key] == 0 and key in self._ready_called:
            self._after(optimizer)


def _inner(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that a wrapper holds, because its user may step them directly."""
    return [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]


def with_closure(args: tuple[Any, ...], kwargs: dict[str, Any], wrap: Callable[[Closure], Closure]) -> Arguments | None:
    """Return the arguments of a step with a wrapped closure; ``None`` if there is no closure.

    Example:
        >>> args, kwargs = with_closure((), {"closure": lambda: 1}, lambda closure: lambda: closure() + 1)
        >>> kwargs["closure"]()
        2
    """
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": wrap(kwargs["closure"])}
    position = next((i for i, arg in enumerate(args) if callable(arg)), None)
    if position is None:
        return None
    return (*args[:position], wrap(args[position]), *args[position + 1 :]), kwargs
