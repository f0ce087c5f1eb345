"""Optimizers that take turns, as those of a GAN do: even intervals would only ever meet one of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

PATIENCE = 32
"""Steps after a measured one that are watched in vain."""


class Turns:
    """Waits, after a measured step, for the turn of those optimizers that did not step in it.

    Attributes:
        awaited: layers of these; empty if there are none.

    Example:
        >>> turns, held = Turns(), {0: "", 1: ""}
        >>> turns.measured(held, {0}), sorted(turns.awaited)
        (None, [1])
        >>> turns.taken({1}), sorted(turns.awaited)
        (None, [])
    """

    def __init__(self) -> None:
        self.awaited: frozenset[int] = frozenset()
        self._absent: frozenset[int] = frozenset()
        self._waited = 0

    def measured(self, held: Mapping[int, str], stepped: Collection[int]) -> None:
        """Take in a step that was measured because it was due.

        Args:
            held: layer index -> why steps of its optimizer cannot be seen; empty if they can.
            stepped: layers whose optimizer has stepped.
        """
        self._waited, self._absent = 0, self._absent - frozenset(stepped)
        self.awaited = frozenset(i for i, unseen in held.items() if not unseen and i not in stepped) - self._absent

    def taken(self, stepped: Collection[int]) -> None:
        """Take in a step that was measured because some of those that are awaited have stepped."""
        self._waited, self.awaited = 0, self.awaited - frozenset(stepped)

    def missed(self) -> None:
        """Take in a step in which none of those that are awaited has stepped."""
        self._waited += 1
        if self._waited >= PATIENCE:  # until they are seen to step, nobody waits for them again
            self._waited, self._absent, self.awaited = 0, self._absent | self.awaited, frozenset()
