"""The same forward once more, after the step, leaving no trace."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from spectral_monitor.capture.replay.batch_slicing import Samples, slice_batch, tree_map
from spectral_monitor.capture.replay.eager_pass import LossGradient, OutputGradients, precisely
from spectral_monitor.capture.replay.loss_flow import LossFlow, loss_in
from spectral_monitor.state.muted_warnings import muted_warnings
from spectral_monitor.state.rng import AutocastState, RandomState
from spectral_monitor.state.serialize import pack, pack_state, put_state, unpack
from spectral_monitor.state.snapshot import Snapshot, preserved


def clone_tree(value: Any) -> Any:
    """Return a copy of nested containers and their tensors; anything else is shared."""
    return tree_map(value, lambda x: x.detach().clone().requires_grad_(x.requires_grad))


def copied(value: Any, otherwise: Any) -> tuple[Any, Exception | None]:
    """Return a copy of what a forward is given; or ``otherwise``, and why it cannot be copied."""
    try:
        return clone_tree(value), None
    except Exception as error:
        return otherwise, error.with_traceback(None)  # that holds what is on the stack


class RootCall:
    """An outermost module call that is about to be made, remembered so that it can be made again.

    That takes its arguments, copied, for the call may change them in place; the random states and the autocast it
    runs under; and the module's state besides its weights, such as counters, caches and what a recurrent module
    carries from batch to batch.

    Attributes:
        obstacles: reasons why it must not be made again, as :func:`obstacles_in` has them.
        uncopied: why its arguments could not be copied, if they could not; then it cannot be made again.
        reached: calls of measured layers inside it.
        loss: the loss the call returned, if it returned one.
        flow: gradients that arrived there and at whatever else it returned, if they were waited for.
        randomness: before the call.
        given: its positional and keyword arguments, copied.
        modes: whether each module inside was training.
        drew: whether it has drawn random numbers, as far as that was looked at, when it was last made.
        halves: whether it computed in half precision, by autocast.
        returned: gradients of what it returned, if they were waited for.
        first_loss: the loss it returned when it was first made again eagerly and in full precision.
    """

    def __init__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.module = module
        self._precisely = False
        self.returned: OutputGradients | None = None
        self.first_loss: Tensor | None = None
        self.reached = 0
        self.loss: Tensor | None = None
        self.flow: LossFlow | None = None
        self.given, self.uncopied = copied((args, kwargs), ((), {}))
        self.modes = modes(module)
        self.drew = False
        self._state = Snapshot(module, weights=False)
        self.obstacles = obstacles_in((args, kwargs), self._state)
        self.randomness = RandomState.now()
        self._autocast = AutocastState.now(module)
        self.halves = self._autocast.halves

    def precise(self) -> RootCall:
        """Return the same call made eagerly and in full precision, whatever was compiled."""
        precise = copy.copy(self)
        precise._precisely = True
        return precise

    def keep_loss(self, output: Any) -> None:
        """Remember the loss in the call's output."""
        loss = loss_in(output)
        self.loss = None if loss is None else loss.detach().clone()

    def watch_loss(self, output: Any) -> list[RemovableHandle]:
        """Wait for the gradient of the loss in the call's output, if there is one."""
        loss = loss_in(output)
        if loss is None or loss.grad_fn is None:
            return []
        self.flow = LossFlow(loss, output)
        return self.flow.handles

    def gradient_of_loss(self) -> LossGradient | None:
        """Return the gradient that the backward pass began with, where all of it came from the loss in the output."""
        if self.flow is None or len(self.flow.gradients) != 1 or not self.flow.alone():
            return None
        return LossGradient(float(self.flow.gradients[0]))

    def rewind(self) -> None:
        """Give the module the state it had before the call."""
        self._state.restore()

    def __call__(self) -> Tensor | None:
        """Make the call again; the loss it returns, if any, with its graph if there is one."""
        return loss_in(self.output())

    def output(self) -> Any:
        """Make the call again; return what it returns."""
        args, kwargs = clone_tree(self.given)
        how = precisely(self.module) if self._precisely else self._autocast.replayed()
        with self.randomness.replayed(), how, muted_warnings():
            output = self.module(*args, **kwargs)
            self.drew = not self.randomness.same(RandomState.now())
        return output

    def part(self, which: Samples) -> RootCall:
        """Return the same call with some samples of its batch."""
        part = copy.copy(self)
        part.given = slice_batch(self.given, which)
        return part

    def pack(self, model: nn.Module) -> dict[str, Any]:
        """In plain types, to be made again in another process; to be asked for right after :meth:`rewind`.

        Raises:
            NotPlainError: naming the argument or the part of the module's state that is none.
        """
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
    if isinstance(value, (list, tuple, Mapping)):
        items = value.values() if isinstance(value, Mapping) else value
        return [name for item in items for name in iterators_in(item)]
    return [type(value).__name__] if isinstance(value, Iterator) else []
