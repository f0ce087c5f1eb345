"""The same forward once more, after the step, leaving no trace."""

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
Whole = TypeVar("Whole", bound="Replayable")


def clone_tree(value: Any) -> Any:
    """Return a copy of nested containers and their tensors; anything else is shared."""
    return tree_map(value, lambda x: x.detach().clone().requires_grad_(x.requires_grad))


def copied(value: Any, otherwise: Any) -> tuple[Any, Exception | None]:
    """Return a copy of what a forward is given; or ``otherwise``, and why it cannot be copied."""
    try:
        return clone_tree(value), None
    except Exception as error:
        return otherwise, error.with_traceback(None)  # that holds what is on the stack


class Repeatable:
    """A piece of training that can be run again as it was, with its own randomness and precision.

    Attributes:
        obstacles: reasons why it must not be; empty if it may.
        uncopied: why what it is given could not be copied, if it could not; then it cannot be.
    """

    obstacles: Sequence[str]
    uncopied: Exception | None = None
    _state: Snapshot
    _precisely = False

    def rewind(self) -> None:
        """Give the module the state it had before that, but for its weights."""
        self._state.restore()

    def __call__(self) -> Tensor | None:
        """Run it; the loss, if it has one, with its graph if there is one."""
        raise NotImplementedError

    def precise(self: Kind) -> Kind:
        """Return the same, to be run eagerly and in full precision whatever is compiled."""
        precise = copy.copy(self)
        precise._precisely = True
        return precise


class Replayable(Repeatable):
    """A forward that is about to be made, remembered so that it can be made again, as a whole or for some samples.

    That takes what it is given, copied, for it may change that in place; the random states it runs under; and the
    module's state besides its weights, such as counters, caches and what a recurrent module carries from batch to
    batch.

    Attributes:
        module: what is called.
        given: what it is given, copied: nested containers and their tensors.
        modes: whether each module inside was training.
        drew: whether it has drawn random numbers, as far as that was looked at, when it was last made.
        first_loss: the loss of all samples when it was first made again eagerly and in full precision.
        randomness: before it.
    """

    def __init__(self, module: nn.Module, given: Any, otherwise: Any = None) -> None:
        """``otherwise``: what stands for ``given`` if that cannot be copied."""
        self.module = module
        self.given, self.uncopied = copied(given, otherwise)
        self.modes = modes(module)
        self.drew = False
        self.first_loss: Tensor | None = None
        self._state = Snapshot(module, weights=False)
        self.obstacles = obstacles_in(given, self._state)
        self.randomness = RandomState.now()

    def __call__(self) -> Tensor | None:
        """Run it; the loss that it returns, if any."""
        return loss_in(self.output())

    def output(self) -> Any:
        """Run it; return all that it returns."""
        raise NotImplementedError

    def name_in(self, model: nn.Module) -> str:
        """Return the module's name in a model; empty for the model itself, and for what is no part of it."""
        return next((name for name, module in named_modules(model) if module is self.module), "")

    def part(self: Whole, which: Samples) -> Whole:
        """Return the same forward with some samples of its batch."""
        part = copy.copy(self)
        part.given = slice_batch(self.given, which)
        return part

    def pack(self, model: nn.Module) -> dict[str, Any]:
        """In plain types, to be made again in another process; to be asked for right after :meth:`rewind`.

        Raises:
            NotPlainError: naming what in the arguments or the module's state is none.
        """
        raise NotImplementedError


def why_not(again: Repeatable) -> str:
    """Return why something cannot be run again; empty if it can."""
    if again.uncopied is not None:
        return f"its arguments cannot be copied: {type(again.uncopied).__name__}: {again.uncopied}"
    return again.obstacles[0] if again.obstacles else ""


class RootCall(Replayable):
    """An outermost module call that is about to be made, and the autocast it runs under.

    Attributes:
        reached: calls of measured layers inside it.
        loss: the loss the call returned, if it returned one.
        flow: gradients that arrived there and at whatever else it returned, if they were waited for.
        halves: whether it computed in half precision, by autocast.
        returned: gradients of what it returned, if they were waited for.
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
        """Remember the loss in the call's output and, to ``watch`` it, wait for its gradient; return the hooks."""
        loss = loss_in(output)
        self.loss = None if loss is None else loss.detach().clone()
        if not watch or loss is None or loss.grad_fn is None:
            return []
        self.flow = LossFlow(loss, output)
        return self.flow.handles

    def gradient_of_loss(self) -> LossGradient | None:
        """Return the gradient that the backward pass began with, where all of it came from the loss in the output."""
        if self.flow is None or len(self.flow.gradients) != 1 or not self.flow.alone():
            return None
        return LossGradient(float(self.flow.gradients[0]))

    def output(self) -> Any:
        """Make the call again; return what it returns."""
        args, kwargs = clone_tree(self.given)
        how = precisely(self.module) if self._precisely else self._autocast.replayed()
        with self.randomness.replayed(), how, muted_warnings():
            output = self.module(*args, **kwargs)
            self.drew = not self.randomness.same(RandomState.now())
        return output

    def pack(self, model: nn.Module) -> dict[str, Any]:
        """In plain types, see :meth:`Replayable.pack`."""
        return {
            "kind": "call",
            "module": next(name for name, module in model.named_modules() if module is self.module),
            "args": pack(tuple(self.given[0]), "args"),
            "kwargs": pack(dict(self.given[1]), "kwargs"),
            "state": pack_state(self.module),
            "randomness": self.randomness.pack(),
            "autocast": self._autocast.pack(),
            "precisely": self._precisely,
        }

    @classmethod
    def unpack(cls, packed: dict[str, Any], model: nn.Module) -> RootCall:
        """Return the call that was packed, to be made with a part of ``model``.

        Raises:
            Exception: if the model is not built like the one it was made of.
        """
        module = model.get_submodule(packed["module"])
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        with preserved(module):
            put_state(module, packed["state"])
            args, kwargs = (unpack(packed[key], device) for key in ("args", "kwargs"))
            call = cls(module, args, kwargs)
            call._precisely = bool(packed.get("precisely", False))
            call.rewind()  # hooks that come later are not the forward's
        call.randomness = RandomState.unpack(packed["randomness"])
        call._autocast = AutocastState.unpack(packed["autocast"])
        return call


def modes(module: nn.Module) -> tuple[bool, ...]:
    """Return whether each module in it is training."""
    return tuple(inside.training for inside in module.modules())


def obstacles_in(arguments: Any, state: Snapshot) -> list[str]:
    """Return why a call must not be made again: it would use up iterators, or change what cannot be put back."""
    iterators = [*iterators_in(arguments), *state.iterators]
    return [*(f"that would use up an iterator ({name})" for name in iterators), *state.refused]


def iterators_in(value: Any) -> list[str]:
    """Types of the iterators in nested containers."""
    if isinstance(value, Iterator):
        return [type(value).__name__]
    inside = value.items() if isinstance(value, Mapping) else contents(value) or ()
    return [name for _, item in inside for name in iterators_in(item)]
