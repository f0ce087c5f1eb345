"""The user's settings, checked once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from spectral_monitor.arguments import is_integer, is_number
from spectral_monitor.engine.schedule import DEFAULT_SCHEDULE, Interval, Timetable
from spectral_monitor.quantities import needs, resolve

FEATURES = frozenset({"h", "b", "dh", "probe"})
"""Needs that require hooks on modules."""
ATTENTION = frozenset({"qk", "dqk", "logits"})
"""Needs that require attention blocks."""


def _are_texts(values: object) -> bool:
    return isinstance(values, Sequence) and not isinstance(values, str) and all(isinstance(v, str) for v in values)


def _is_share(value: object) -> bool:
    return is_number(value) and 0 < value < 1


@dataclass(frozen=True)
class Settings:
    """Arguments that all entry points share; :class:`~spectral_monitor.SpectralMonitor` says what they mean.

    Attributes:
        schedule: the quantities that are measured at each step.
        keys: all quantities that are measured.
        needs: what must be captured for them.

    Raises:
        ValueError: a number out of range, an unknown tier or key, an empty list to include.
        TypeError: ``include``, ``exclude`` or ``nodes`` is a string instead of a list.
    """

    every_n_steps: Interval | Mapping[str, Interval] = DEFAULT_SCHEDULE
    quantities: str | Sequence[str] = "standard"
    include: Sequence[str] | None = None
    exclude: Sequence[str] | None = None
    roles: Mapping[str, str] | None = None
    blocks: Mapping[str, int] | None = None
    heads: Mapping[str, int] | None = None
    nodes: Sequence[str] | None = None
    max_rows: int | None = 512
    tol: float = 0.05
    drift_every: int = 5
    history: int = 1000
    replay_samples: int | Literal["auto"] | None = "auto"
    low_memory: bool = False
    max_overhead: float | Literal["auto"] | None = "auto"
    schedule: Timetable = field(init=False)
    keys: tuple[str, ...] = field(init=False)
    needs: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        for name, others, alternatives in (
            ("max_rows", (None,), " or None"),
            ("replay_samples", (None, "auto"), ", None or 'auto'"),
            ("drift_every", (), ""),
            ("history", (), ""),
        ):
            value = getattr(self, name)
            if value not in others and not is_integer(value, 1):
                raise ValueError(f"{name} must be an integer >= 1{alternatives}, got {value!r}")
        if not _is_share(self.tol):
            raise ValueError(f"tol must be a number in (0, 1), got {self.tol!r}")
        share = self.max_overhead
        if share not in (None, "auto") and not _is_share(share):
            raise ValueError(
                f"max_overhead must be a share of training time in (0, 1), such as 0.01, 'auto' or None; got {share!r}"
            )
        if not isinstance(self.low_memory, bool):
            raise ValueError(f"low_memory must be True or False, got {self.low_memory!r}")
        for name in ("include", "exclude", "nodes"):
            patterns = getattr(self, name)
            if patterns is not None and not _are_texts(patterns):
                example = "['blocks.*', 'norm']" if name == "nodes" else "['*.bias']"
                raise TypeError(f"{name} must be a list of patterns, such as {example}, got {patterns!r}")
        if self.include is not None and not self.include:
            raise ValueError(f"include must name at least one pattern, or be None for all layers; got {self.include!r}")
        for name, example in (("roles", "{'head': 'output'}"), ("blocks", "{'*.qkv': 3}"), ("heads", "{'*.attn': 8}")):
            patterns = getattr(self, name)
            if patterns is not None and not (isinstance(patterns, Mapping) and _are_texts(list(patterns))):
                raise TypeError(f"{name} must map patterns, such as {example}, got {patterns!r}")
        object.__setattr__(self, "keys", resolve(self.quantities))
        object.__setattr__(self, "needs", needs(self.keys))
        object.__setattr__(self, "schedule", Timetable.of(self.every_n_steps, self.keys))

    def only(self, keys: Collection[str]) -> Settings:
        """Return the settings of a step at which only these keys are measured."""
        return self if set(keys) == set(self.keys) else replace(self, every_n_steps=1, quantities=tuple(keys))
