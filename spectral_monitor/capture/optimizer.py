"""The very update: a call right before it and one right after, whatever loop runs the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

Moment = Callable[[Optimizer], None]


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
    Only the outermost counts, and it counts for the wrapper.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], enter: Moment, before: Moment, ready: Moment, after: Moment
    ) -> None:
        self.optimizers = tuple(optimizers)
        self._on_enter = enter
        self._before = before
        self._ready = ready
        self._after = after
        self._handles: list[RemovableHandle] = []
        self._depth: dict[int, int] = {}
        self._held: set[int] = set()
        self._seen: set[int] = set()
        self.closure_calls: dict[int, int] = {}

    def arm(self) -> None:
        """Register the hooks."""
        self._depth.clear()
        self._held.clear()
        self._seen.clear()
        self.closure_calls.clear()
        for optimizer in self.optimizers:
            for part in (optimizer, *_inner(optimizer)):
                self._handles.append(part.register_step_pre_hook(partial(self._enter, optimizer)))
                self._handles.append(part.register_step_post_hook(partial(self._leave, optimizer)))

    def disarm(self) -> None:
        """Remove the hooks; safe to call at any time."""
        while self._handles:
            self._handles.pop().remove()

    def _enter(self, optimizer: Optimizer, _: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        key = id(optimizer)
        self._depth[key] = self._depth.get(key, 0) + 1
        if self._depth[key] > 1:
            return None
        self._held.discard(key)
        self._seen.discard(key)
        self.closure_calls[key] = 0
        in_kwargs = callable(kwargs.get("closure"))
        place = next((i for i, arg in enumerate(args) if callable(arg)), None)
        if not in_kwargs and place is None:
            self._snapshot(optimizer)
            return None
        if not type(optimizer).__module__.startswith("torch.optim"):
            self._hold(optimizer)
        closure = kwargs["closure"] if in_kwargs else args[place]

        def watched(*inner_args: Any, **inner_kwargs: Any) -> Any:
            if not self.closure_calls[key]:
                self._on_enter(optimizer)
            result = closure(*inner_args, **inner_kwargs)
            self.closure_calls[key] += 1
            self._snapshot(optimizer)
            return result

        if in_kwargs:
            return args, {**kwargs, "closure": watched}
        return tuple(watched if i == place else arg for i, arg in enumerate(args)), kwargs

    def _hold(self, optimizer: Optimizer) -> None:
        if id(optimizer) not in self._held:
            self._held.add(id(optimizer))
            self._before(optimizer)

    def _snapshot(self, optimizer: Optimizer) -> None:
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
