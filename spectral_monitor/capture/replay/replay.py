"""Calls that are recorded so that they can be repeated after the step, without side effects."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from spectral_monitor.capture.replay.batch_slicing import Samples, contents, slice_batch, tree_map
from spectral_monitor.capture.replay.eager_pass import LossGradient, OutputGradients, precisely
from spectral_monitor.capture.replay.loss_flow import LossFlow, loss_in
from spectral_monitor.layers.naming import named_modules
from spectral_monitor.state.muted_warnings import muted_warnings
from spectral_monitor.state.rng import AutocastState, RandomState
from spectral_monitor.state.serialize import pack, pack_state, put_state, unpack
from spectral_monitor.state.snapshot import Snapshot, preserved

Kind = TypeVar("Kind", bound="Repeatable")
Forward = TypeVar("Forward", bound="Replayable")


def clone_tree(value: Any) -> Any:
    """Return a copy of nested containers and their tensors; anything else is shared."""
    return tree_map(value, lambda x: x.detach().clone().requires_grad_(x.requires_grad))


class Repeatable:
    """A piece of training that can be repeated with its own randomness and precision.

    Attributes:
        obstacles: reasons why it must not be repeated; empty if it may.
        uncopied: the error that prevented a copy of its arguments; it cannot be repeated then.
    """

    obstacles: Sequence[str]
    uncopied: Exception | None = None
    _state: Snapshot
    _precisely = False

    def rewind(self) -> None:
        """Give the module the state that it had at first, except for its weights."""
        self._state.restore()

    def __call__(self) -> Tensor | None:
        """Run it; return the loss, if it has one, with its graph if there is one."""
        raise NotImplementedError

    def precise(self: Kind) -> Kind:
        """Return a copy that runs eagerly and in full precision, even if the module is compiled."""
        precise = copy.copy(self)
        precise._precisely = True
        return precise


class Replayable(Repeatable):
    """A forward that is recorded right before it runs, so that it can be repeated for all or for some samples.

    The record has copies of the arguments, because a forward may change them in place; the random states; and the
    module's state besides its weights, such as counters, caches and the state of a recurrent module.

    Attributes:
        module: the module that is called.
        arguments: copies of nested containers and their tensors.
        modes: for each module inside, whether it was training.
        drew: whether its last run drew random numbers, as far as that is known.
        first_loss: the loss of all samples in the first rerun, eagerly and in full precision.
        randomness: the random states before it.
    """

    def __init__(self, module: nn.Module, arguments: Any, fallback: Any = None) -> None:
        """``fallback``: replaces ``arguments`` that cannot be copied."""
        self.module = module
        try:
            self.arguments = clone_tree(arguments)
        except Exception as error:
            # A traceback would keep the objects of the stack alive.
            self.arguments, self.uncopied = fallback, error.with_traceback(None)
        self.modes = tuple(part.training for part in module.modules())
        self.drew = False
        self.first_loss: Tensor | None = None
        self._state = Snapshot(module, weights=False)
        self.obstacles = obstacles_in(arguments, self._state)
        self.randomness = RandomState.now()

    def __call__(self) -> Tensor | None:
        """Run it; return its loss, if it has one."""
        return loss_in(self.output())

    def output(self) -> Any:
        """Run it; return its output."""
        raise NotImplementedError

    def name_in(self, model: nn.Module) -> str:
        """Return the module's name in a model; empty for the model itself, and for a module that is no part of it."""
        return next((name for name, module in named_modules(model) if module is self.module), "")

    def part(self: Forward, samples: Samples) -> Forward:
        """Return the same forward with some samples of its batch."""
        part = copy.copy(self)
        part.arguments = slice_batch(self.arguments, samples)
        return part

    def pack(self, model: nn.Module) -> dict[str, Any]:
        """Return the call in plain types, to be repeated in another process; call it right after :meth:`rewind`.

        Raises:
            NotPlainError: naming a value that plain types cannot express, in the arguments or the module's state.
        """
        return {
            "state": pack_state(self.module),
            "randomness": self.randomness.pack(),
            "precisely": self._precisely,
        }

    @classmethod
    def _again(cls: type[Forward], packed: dict[str, Any], module: nn.Module, *arguments: Any) -> Forward:
        """Return a packed call of a module, made with the constructor's other arguments."""
        with preserved(module):
            put_state(module, packed["state"])
            call = cls(module, *arguments)
            call.rewind()  # fixes which hooks are the forward's own: hooks that are added later stay
        call.randomness = RandomState.unpack(packed["randomness"])
        call._precisely = bool(packed.get("precisely", False))
        return call


def why_not(repeatable: Repeatable) -> str:
    """Return the reason why something cannot be repeated; empty if it can."""
    if repeatable.uncopied is not None:
        return f"its arguments cannot be copied: {type(repeatable.uncopied).__name__}: {repeatable.uncopied}"
    return repeatable.obstacles[0] if repeatable.obstacles else ""


class RootCall(Replayable):
    """An outermost module call, recorded right before it runs, and its autocast.

    Attributes:
        reached: number of calls of measured layers inside it.
        loss: the loss in its output, if there is one.
        flow: gradients that arrived at the loss and at other outputs, if they were recorded.
        halves: whether it computed in half precision, by autocast.
        returned: gradients of its outputs, if they were recorded.
    """

    def __init__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        super().__init__(module, (args, kwargs), ((), {}))
        self.returned: OutputGradients | None = None
        self.reached = 0
        self.loss: Tensor | None = None
        self.flow: LossFlow | None = None
        self._autocast = AutocastState.now(module)
        self.halves = self._autocast.halves

    def keep_loss(self, output: Any, watch: bool = True) -> list[RemovableHandle]:
        """Keep the loss in the call's output, and ``watch`` for its gradient if asked to; return the hooks."""
        loss = loss_in(output)
        self.loss = None if loss is None else loss.detach().clone()
        if not watch or loss is None or loss.grad_fn is None:
            return []
        self.flow = LossFlow(loss, output)
        return self.flow.handles

    def gradient_of_loss(self) -> LossGradient | None:
        """Return the gradient that the backward pass began with, if all gradients came from the loss in the output."""
        if self.flow is None or len(self.flow.gradients) != 1 or not self.flow.alone():
            return None
        return LossGradient(float(self.flow.gradients[0]))

    def output(self) -> Any:
        """Repeat the call; return its output."""
        args, kwargs = clone_tree(self.arguments)
        precision = precisely(self.module) if self._precisely else self._autocast.replayed()
        with self.randomness.replayed(), precision, muted_warnings():
            output = self.module(*args, **kwargs)
            self.drew = not self.randomness.same(RandomState.now())
        return output

    def pack(self, model: nn.Module) -> dict[str, Any]:
        """Return the call in plain types, see :meth:`Replayable.pack`."""
        return {
            "kind": "call",
            "module": next(name for name, module in model.named_modules() if module is self.module),
            "args": pack(tuple(self.arguments[0]), "args"),
            "kwargs": pack(dict(self.arguments[1]), "kwargs"),
            "autocast": self._autocast.pack(),
            **super().pack(model),
        }

    @classmethod
    def unpack(cls, packed: dict[str, Any], model: nn.Module) -> RootCall:
        """Return a packed call, to be repeated with a part of ``model``.

        Raises:
            Exception: the model is not built like the one that was packed.
        """
        module = model.get_submodule(packed["module"])
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        call = cls._again(packed, module, *(unpack(packed[key], device) for key in ("args", "kwargs")))
        call._autocast = AutocastState.unpack(packed["autocast"])
        return call


def obstacles_in(arguments: Any, state: Snapshot) -> list[str]:
    """Return why a call must not be repeated: it would use up iterators, or change objects that cannot be restored."""
    iterators = [*iterators_in(arguments), *state.iterators]
    return [*(f"that would use up an iterator ({name})" for name in iterators), *state.refused]


def iterators_in(value: Any) -> list[str]:
    """Return the types of the iterators in nested containers."""
    if isinstance(value, Iterator):
        return [type(value).__name__]
    items = value.items() if isinstance(value, Mapping) else contents(value) or ()
    return [name for _, item in items for name in iterators_in(item)]
