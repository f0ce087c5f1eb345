"""Optimizers that take turns, as those of a GAN do: even intervals would only ever meet one of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

PATIENCE = 32
"""Steps that are watched in vain before one is measured all the same."""


class Turns:
    """Waits for those optimizers that did not step when a step was measured last.

    Attributes:
        awaited: layers of which one is to step in the step that is measured next; empty if any step will do.

    Example:
        >>> turns, held = Turns(), {0: "", 1: ""}
        >>> turns.measured(held, {0}), sorted(turns.awaited)
        (None, [1])
        >>> turns.measured(held, {1}), sorted(turns.awaited)
        (None, [0])
        >>> turns.measured(held, {0, 1}), sorted(turns.awaited)
        (None, [])
    """

    def __init__(self) -> None:
        self.awaited: frozenset[int] = frozenset()
        self._absent: frozenset[int] = frozenset()
        self._waited = 0

    def measured(self, held: Mapping[int, str], stepped: Collection[int]) -> None:
        """Take in a step that was measured.

        Args:
            held: layer index -> why steps of its optimizer cannot be seen; empty if they can.
            stepped: layers whose optimizer has stepped.
        """
        self._waited, self._absent = 0, self._absent - frozenset(stepped)
        self.awaited = frozenset(i for i, unseen in held.items() if not unseen and i not in stepped) - self._absent

    def missed(self) -> None:
        """Take in a step in which none of those that are awaited has stepped."""
        self._waited += 1
        if self._waited >= PATIENCE:  # until they are seen to step, nobody waits for them again
            self._waited, self._absent, self.awaited = 0, self._absent | self.awaited, frozenset()
