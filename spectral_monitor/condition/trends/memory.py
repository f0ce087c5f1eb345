"""The memory of a trend: what it remembers of earlier measurements, and how that is saved."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, fields
from typing import Any


@dataclass
class Memory:
    """The fields of a trend, which have plain types: dicts, lists, numbers, texts.

    Example:
        >>> @dataclass
        ... class Count(Memory):
        ...     steps: int = 0
        ...     name: str = ""
        >>> count = Count()
        >>> count.load_state_dict({"steps": 3})
        >>> count.state_dict()
        {'steps': 3}
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the fields in plain types, without those that still have their initial values."""
        initial = type(self)()
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: deepcopy(value) for name, value in values.items() if value != getattr(initial, name)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, which may have more fields; those that it lacks get their initial values."""
        initial = type(self)()
        for field in fields(self):
            setattr(self, field.name, deepcopy(state.get(field.name, getattr(initial, field.name))))
