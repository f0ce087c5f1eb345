"""The very update: a call right before it and one right after, whatever loop runs the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

Moment = Callable[[Optimizer], None]


class OptimizerCapture:
    """Hooks on optimizers, there only while armed.

    ``before`` runs after the gradients are final and before any parameter changes: at the optimizer's step, or, if
    the step is given a closure that does forward and backward inside it, when that closure has returned for the
    first time; ``enter`` then runs before the closure. ``after`` runs when the step is done. A subclass whose
    ``step`` calls its parent's fires nested hooks; only the outermost pair counts.
    """

    def __init__(self, optimizers: Sequence[Optimizer], enter: Moment, before: Moment, after: Moment) -> None:
        self.optimizers = tuple(optimizers)
        self._on_enter = enter
        self._before = before
        self._after = after
        self._handles: list[RemovableHandle] = []
        self._depth: dict[int, int] = {}
        self._seen: set[int] = set()
        self.closure_calls: dict[int, int] = {}

    def arm(self) -> None:
        """Register the hooks."""
        self._depth.clear()
        self._seen.clear()
        self.closure_calls.clear()
        for optimizer in self.optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._enter))
            self._handles.append(optimizer.register_step_post_hook(self._leave))

    def disarm(self) -> None:
        """Remove the hooks; safe to call at any time."""
        while self._handles:
            self._handles.pop().remove()

    def _enter(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        key = id(optimizer)
        self._depth[key] = self._depth.get(key, 0) + 1
        if self._depth[key] > 1:
            return None
        self._seen.discard(key)
        self.closure_calls[key] = 0
        in_kwargs = callable(kwargs.get("closure"))
        place = next((i for i, arg in enumerate(args) if callable(arg)), None)
        if not in_kwargs and place is None:
            self._snapshot(optimizer)
            return None
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

    def _snapshot(self, optimizer: Optimizer) -> None:
        if id(optimizer) not in self._seen:
            self._seen.add(id(optimizer))
            self._before(optimizer)

    def _leave(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        key = id(optimizer)
        self._depth[key] = self._depth.get(key, 1) - 1
        if self._depth[key] == 0 and key in self._seen:
            self._after(optimizer)
