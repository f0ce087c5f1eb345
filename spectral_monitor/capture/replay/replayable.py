"""Forwards that can be run again after the step: a call of a module, or a whole training step."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn

from spectral_monitor.capture.replay.batch_slicing import Samples


class Repeatable(Protocol):
    """A piece of training that can be run again as it was, with its own randomness and precision.

    Attributes:
        obstacles: reasons why it must not be; empty if it may.
        uncopied: why what it is given could not be copied, if it could not; then it cannot be.
    """

    obstacles: list[str]
    uncopied: Exception | None

    def rewind(self) -> None:
        """Give the model the state it had before that forward, but for its weights."""

    def __call__(self) -> Tensor | None:
        """Run it; the loss, if it has one."""

    def precise(self) -> Repeatable:
        """Return the same, to be run eagerly and in full precision whatever is compiled."""


class Replayable(Repeatable, Protocol):
    """A forward that can be run again, as a whole or for some samples.

    Attributes:
        module: what is called.
        given: what it is given: nested containers and their tensors.
        modes: whether each module inside was training.
        drew: whether it has drawn random numbers when it was last run again.
        first_loss: the loss of all samples when it was first run again eagerly and in full precision.
    """

    module: nn.Module
    given: Any
    modes: tuple[bool, ...]
    drew: bool
    first_loss: Tensor | None

    def output(self) -> Any:
        """Run it; return all that it returns."""

    def part(self, which: Samples) -> Replayable:
        """Return the same forward with some samples of its batch."""

    def precise(self) -> Replayable:
        """Return the same forward, to be run eagerly and in full precision whatever is compiled."""

    def pack(self, model: nn.Module) -> dict[str, Any]:
        """Return all of it in plain types, when the model was just rewound; raise an error if that is impossible."""


def why_not(again: Repeatable) -> str:
    """Return why something cannot be run again; empty if it can."""
    if again.uncopied is not None:
        return f"its arguments cannot be copied: {type(again.uncopied).__name__}: {again.uncopied}"
    return again.obstacles[0] if again.obstacles else ""
