"""Memory of a trend: what it knows of earlier measurements, and how that is saved."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, fields
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
        start = type(self)()
        now = {one.name: getattr(self, one.name) for one in fields(self)}
        return {key: deepcopy(value) for key, value in now.items() if value != getattr(start, key)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, which may hold more; what it lacks, if an older version saved it, is as at the start."""
        start = type(self)()
        for one in fields(self):
            setattr(self, one.name, deepcopy(state.get(one.name, getattr(start, one.name))))
