"""What the user asked for, checked once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from spectral_monitor.engine.schedule import Schedule
from spectral_monitor.quantities import needs, resolve


@dataclass(frozen=True)
class Settings:
    """Arguments shared by every way into the monitor.

    Attributes:
        every_n_steps: measure every n-th optimizer step, or steps in words: ``"1, 2, 4, ..., every 100"``.
        quantities: a tier (``"light"``, ``"standard"``, ``"full"``) or a list of keys; only what they need is paid for.
        include: fnmatch patterns on module or layer names; only these are measured.
        exclude: fnmatch patterns on module or layer names; these are not measured.
        roles: pattern -> role, overriding the guess.
        blocks: pattern -> matrices stacked in the parameter.
        max_rows: rows of a layer's features that are used at most, a fixed choice; ``None`` for all.
        tol: relative tolerance of spectral norms.
        drift_every: ``feature_drift``, which needs a forward of its own, at every n-th measured step.
        history: measurements that are kept.

    Raises:
        ValueError: a number out of range, an unknown tier or key.
        TypeError: ``include`` or ``exclude`` is a string instead of a list.
    """

    every_n_steps: int | str = 50
    quantities: str | Sequence[str] = "standard"
    include: Sequence[str] | None = None
    exclude: Sequence[str] | None = None
    roles: Mapping[str, str] | None = None
    blocks: Mapping[str, int] | None = None
    max_rows: int | None = 4096
    tol: float = 0.01
    drift_every: int = 5
    history: int = 1000
    schedule: Schedule = field(init=False)
    keys: tuple[str, ...] = field(init=False)
    needs: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedule", Schedule.of(self.every_n_steps))
        for name in ("max_rows", "drift_every", "history"):
            value = getattr(self, name)
            if value is None and name == "max_rows":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
        if not 0 < self.tol < 1:
            raise ValueError(f"tol must be in (0, 1), got {self.tol!r}")
        for name in ("include", "exclude"):
            if isinstance(getattr(self, name), str):
                raise TypeError(f"{name} must be a list of patterns, got the string {getattr(self, name)!r}")
        object.__setattr__(self, "keys", resolve(self.quantities))
        object.__setattr__(self, "needs", needs(self.keys))
