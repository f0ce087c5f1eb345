"""Memory of a trend: what it knows of earlier measurements, and how that is saved."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any


@dataclass
class Memory:
    """The fields of a trend, which are of plain types: dicts, lists, numbers, texts.

    Example:
        >>> @dataclass
        ... class Count(Memory):
        ...     seen: int = 0
        ...     name: str = ""
        >>> count = Count()
        >>> count.load_state_dict({"seen": 3})
        >>> count.state_dict()
        {'seen': 3}
    """

    def state_dict(self) -> dict[str, Any]:
        """Return what is remembered, in plain types; what is as at the start is left out."""
        start = vars(type(self)())
        return {key: deepcopy(value) for key, value in vars(self).items() if value != start[key]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, which may hold more; what it lacks, if an older version saved it, is as at the start."""
        vars(self).update({key: deepcopy(state.get(key, value)) for key, value in vars(type(self)()).items()})
