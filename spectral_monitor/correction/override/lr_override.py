"""A learning rate for every parameter, in force only while the optimizer updates."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from types import FrameType, MethodType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from spectral_monitor.arguments import is_number
from spectral_monitor.capture.hooks.optimizer import Closure, OptimizerCapture, with_closure
from spectral_monitor.capture.hooks.registration import Hook
from spectral_monitor.correction.override.group_split import Expansion, lists_of

_UNFIT = {
    "LBFGS": "it reads one group before it knows the gradient, and uses one step size for all parameters",
    "Rprop": "it reads its learning rate only at the first step",
    "ZeroRedundancyOptimizer": "every process has its own groups, which are copied to one another by position",
    "ScheduleFree": "it averages weights by past learning rates, and a group has one for all its parameters",
    "Prodigy": "it finds one learning rate for all of a group by itself",
    "DAdapt": "it finds one learning rate for all of a group by itself",
}

INSTEAD = "use SGD, Adam or another optimizer whose learning rate sizes each step"
"""Advice where the learning rates of an optimizer cannot be corrected."""
OWNER_ATTRIBUTE = "_spectral_monitor_correction"
"""Attribute of a ``step`` that names the :class:`_OwnStep` it belongs to."""


@dataclass
class _Step:
    """A step under way."""

    # of the call that torch's hooks are called from: the step lasts as long as it runs. ``None`` afterwards, for the
    # frame holds the closure, which holds this: the cycle would keep a batch in memory until it is collected.
    frame: FrameType | None
    expansion: Expansion  # of the groups; closed while the optimizer must not see it


class LRMultiplierOverride:
    """Every step of some optimizers runs with each parameter's learning rate times its multiplier.

    The optimizer sees parameters with different multipliers as separate groups, and only while it updates. Schedulers,
    checkpoints, other callbacks and the forward see the original groups, the same objects. The result equals, bit for
    bit, that of groups made before training. Where all multipliers are 1 nothing is touched.

    * When: from the return of the closure's first call, if ``step`` is given one, to the end of the step, but not
      during further calls; without a closure, the whole step.
    * Weight decay that is part of the gradient (``SGD``, ``Adam``) is scaled with it. Where weights are shrunk by
      learning rate times decay apart from the gradient, the decay is divided by the multiplier, so that it keeps its
      strength: in groups that say ``decoupled_weight_decay``, in torch's ``AdamW``, ``Adafactor``, ``Muon`` and
      ``ASGD`` (``lambd``) and their subclasses. Other optimizers' kind of decay is unknown, and it is left as it is.
    * What the optimizer writes into its groups is taken over: counters as they are, a learning rate without the
      multiplier. If parts of one group end with different values, the step ends in an error.
    * Hooks of others see the original groups, whenever they were registered, unless torch calls them once more for a
      step inside the step. Hooks of the measurement see the groups of the update, whose learning rates it needs.
    * An exception inside a step restores the groups, without what the optimizer wrote into them. Torch calls no hook
      then, so while armed every optimizer has a ``step`` of its own around the one it had. If a caller goes round it,
      with a method that was taken from the optimizer before, the next step or :meth:`disarm` restores them.
    * ``Adafactor`` bounds its learning rate by ``1 / sqrt(step)``, multiplier and all; ``ASGD`` uses a new one a step
      late. A step replayed as a CUDA graph keeps the multipliers it was recorded with.

    Args:
        optimizers: as they are, without the wrappers of Fabric or Accelerate. One that works through another, held in
            an attribute, counts together with it.
        multipliers: parameter -> multiplier; 1 for those that are not named. May name parameters that no optimizer
            holds, or not yet.
        group_factor: returns a further factor for each group, at every step.
        keeps_decay: whether a decay apart from the gradient keeps its strength; else it goes with the learning rate, as
            in a group made with that learning rate.

    Raises:
        ValueError: a multiplier that is not a positive number; LBFGS, Rprop, ZeroRedundancyOptimizer, schedule-free
            optimizers, Prodigy, D-Adaptation; a group without a learning rate; an optimizer whose steps or groups
            cannot be reached.
        TypeError: something that is not an optimizer.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> swap = LRMultiplierOverride([optimizer], {model.bias: 4.0})
        >>> swap.arm()
        >>> before = model.bias.detach().clone()
        >>> model(torch.ones(1, 3)).sum().backward()
        >>> optimizer.step()
        >>> before - model.bias.detach()
        tensor([0.4000, 0.4000])
        >>> [group["lr"] for group in optimizer.param_groups]
        [0.1]
        >>> swap.disarm()
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        multipliers: Mapping[Any, float],
        *,
        group_factor: Callable[[dict[str, Any]], float] = lambda group: 1.0,
        keeps_decay: bool = True,
    ) -> None:
        self._group_factor, self._keeps_decay = group_factor, keeps_decay
        self._owners: list[tuple[Optimizer, ...]] = []
        counted: set[int] = set()
        for optimizer in optimizers:
            if not isinstance(optimizer, Optimizer):
                raise TypeError(f"expected a torch.optim.Optimizer, got {optimizer!r}")
            if id(optimizer) not in counted:
                owners = tuple(_with_inner(optimizer))
                _refuse(owners)
                self._owners.append(owners)
                counted.update(map(id, owners))
        self._handles: list[RemovableHandle | _OwnStep] = []
        self._steps: dict[int, _Step] = {}
        self.multipliers = multipliers

    @property
    def multipliers(self) -> Mapping[Any, float]:
        """Parameter -> multiplier; a new mapping counts from the next update."""
        return dict(self._multipliers)

    @multipliers.setter
    def multipliers(self, multipliers: Mapping[Any, float]) -> None:
        for parameter, value in multipliers.items():
            if not isinstance(parameter, Tensor):
                raise TypeError(f"multipliers must map parameters to numbers, got {parameter!r}")
            if not (is_number(value) and math.isfinite(value) and value > 0):
                shape = tuple(parameter.shape)
                raise ValueError(
                    f"the multiplier of a parameter of shape {shape} must be a positive number, got {value!r}"
                )
        # By parameter, not by id: a copy of the parameter has another id.
        self._multipliers = {parameter: float(value) for parameter, value in multipliers.items()}

    def arm(self) -> None:
        """Register the hooks; they stay until :meth:`disarm`."""
        self.disarm()
        for owners in self._owners:
            for owner in filter(_is_hooked, owners):
                self._handles.append(owner.register_step_pre_hook(partial(self._enter, owners)))
                handle = owner.register_step_post_hook(partial(self._leave, owners))
                self._handles.append(handle)
                # Before all others, so that hooks registered earlier see the original groups.
                owner._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
                self._handles.append(
                    _OwnStep(owner, partial(_move_own_hooks_last, owner), partial(self._ended, owners))
                )

    def disarm(self) -> None:
        """Remove what :meth:`arm` added, and restore the groups of an unfinished step; safe at any time."""
        while self._handles:
            self._handles.pop().remove()
        for key in list(self._steps):
            self._close(key, keep=False)

    def _enter(self, owners: tuple[Optimizer, ...], _: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        key, frame = id(owners[0]), sys._getframe(1)
        if key in self._steps and _is_running(self._steps[key].frame, frame):
            return None  # the step of a parent class, or of an inner optimizer: still the same update
        self._close(key, keep=False)
        step = self._steps[key] = _Step(frame, Expansion(owners, self._group_factor, self._keeps_decay))
        replaced = with_closure(args, kwargs, partial(self._outside, key, step))
        if replaced is None:
            step.expansion.open(self._multipliers)
        return replaced

    def _outside(self, key: int, step: _Step, closure: Closure) -> Closure:
        """Return a closure that sees the original groups."""

        def with_original_groups(*args: Any, **kwargs: Any) -> Any:
            """Call the closure between closing the groups and opening them again."""
            step.expansion.close(keep=False)
            result = closure(*args, **kwargs)
            if self._steps.get(key) is step:  # not disarmed meanwhile
                step.expansion.open(self._multipliers)
            return result

        return with_original_groups

    def _leave(self, owners: tuple[Optimizer, ...], _: Optimizer, args: Any, kwargs: Any) -> None:
        key = id(owners[0])
        if key in self._steps and self._steps[key].frame is sys._getframe(1):
            self._close(key, keep=True)

    def _ended(self, owners: tuple[Optimizer, ...]) -> None:
        """Restore the groups after a call of ``step`` that ended in an exception: torch has called no hook then."""
        key = id(owners[0])
        if key in self._steps and not _is_running(self._steps[key].frame, sys._getframe(1)):
            self._close(key, keep=False)

    def _close(self, key: int, *, keep: bool) -> None:
        step = self._steps.pop(key, None)
        if step is not None:
            step.frame = None
            step.expansion.close(keep=keep)
            if keep:
                step.expansion.check()


class _OwnStep:
    """A ``step`` of one optimizer that calls something before and after its original one, even after an exception.

    If something wraps it later, such as an LR scheduler, :meth:`remove` leaves the wrapper, and this passes calls on.

    Raises:
        RuntimeError: another correction is at work.
    """

    def __init__(self, owner: Optimizer, before: Callable[[], None], after: Callable[[], None]) -> None:
        self._holder: dict[str, Any] = vars(owner)
        self._calls: tuple[Callable[[], None], ...] = (before, after)
        self._original = original = self._holder.get("step")  # an LR scheduler's, say; most have their class's alone
        other = getattr(original, OWNER_ATTRIBUTE, None)
        if other is not None and other._calls:
            name = type(owner).__name__
            raise RuntimeError(
                f"another probe or callback already corrects the learning rates of this {name}: remove one of them"
            )

        def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            """Make the optimizer's step, between the two calls until they are removed."""
            run = type(optimizer).step.__get__(optimizer) if original is None else original
            if not self._calls:
                return run(*args, **kwargs)
            before, after = self._calls
            before()
            try:
                return run(*args, **kwargs)
            finally:
                after()

        # Torch's schedulers read an attribute of ``step``, gradient scalers the signature that the class declares.
        vars(step).update(getattr(original, "__dict__", {}))
        setattr(step, OWNER_ATTRIBUTE, self)
        self._step = MethodType(wraps(type(owner).step)(step), owner)
        self._holder["step"] = self._step

    def remove(self) -> None:
        """Restore the original ``step``, and hold nothing any more."""
        if self._holder.get("step") is self._step:
            del self._holder["step"]
            if self._original is not None:
                self._holder["step"] = self._original
        self._calls, self._holder = (), {}
        del self._step


def _move_own_hooks_last(optimizer: Optimizer) -> None:
    """Move the hooks of corrections and measurements behind those of others."""
    hooks: Any = optimizer._optimizer_step_pre_hooks
    own_keys = [key for key, hook in hooks.items() if _is_own(hook)]
    if list(hooks)[len(hooks) - len(own_keys) :] != own_keys:  # else untouched: torch may be iterating over them
        for key in own_keys:
            hooks.move_to_end(key)


def _is_own(hook: Any) -> bool:
    function = hook.function if isinstance(hook, Hook) else hook
    holder = getattr(getattr(function, "func", None), "__self__", None)
    return isinstance(holder, (LRMultiplierOverride, OptimizerCapture))


def _is_running(frame: FrameType | None, running: FrameType | None) -> bool:
    """Return whether a call is among the callers of one that runs; if not, an exception has ended it."""
    while running is not None and running is not frame:
        running = running.f_back
    return running is frame


def _with_inner(optimizer: Optimizer) -> list[Optimizer]:
    """Return an optimizer and those it holds in attributes, singly or in a list or dict."""
    optimizers = {id(optimizer): optimizer}
    for value in vars(optimizer).values():
        items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        optimizers.update((id(item), item) for item in items if isinstance(item, Optimizer))
    return list(optimizers.values())


def _is_hooked(optimizer: Optimizer) -> bool:
    """Return whether torch calls hooks around its step: some wrappers never call ``Optimizer.__init__``."""
    hooked = getattr(type(optimizer).step, "hooked", False)
    return bool(hooked) and hasattr(optimizer, "_optimizer_step_pre_hooks")


def _refuse(owners: Sequence[Optimizer]) -> None:
    name = type(owners[0]).__name__
    for owner in owners:
        for kind in type(owner).__mro__:
            reason = next((reason for name_part, reason in _UNFIT.items() if name_part in kind.__name__), "")
            if reason:
                raise ValueError(
                    f"the learning rates of {name} cannot be corrected layer by layer: {reason}; {INSTEAD}"
                )
    if not any(map(_is_hooked, owners)):
        raise ValueError(f"{name} did not call torch.optim.Optimizer.__init__, so its steps cannot be seen")
    for groups in lists_of(owners):
        for i, group in enumerate(groups):
            lr = group.get("lr")
            if not is_number(lr) and not (isinstance(lr, Tensor) and lr.numel() == 1):
                raise ValueError(
                    f"group {i} of {name} has no learning rate to multiply: lr must be a number, got {lr!r}"
                )
