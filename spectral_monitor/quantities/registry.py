"""All quantities: their registry, the keys that a user requests, and what must be captured for them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from spectral_monitor.quantities import assumptions, attention, features, laziness, optimizers, signals, weights
from spectral_monitor.quantities.quantity import Quantity

QUANTITIES: dict[str, Quantity] = {}
"""Key -> quantity."""
TIERS: dict[str, tuple[str, ...]] = {"light": (), "standard": (), "full": ()}
"""Tier -> keys of its quantities, those of smaller tiers included."""


def register(*entries: Quantity) -> None:
    """Add quantities, which are then measured, logged, shown and documented like all others.

    Args:
        entries: their :attr:`~Quantity.needs` must be captured by the monitor, and their formulas take its
            :class:`~spectral_monitor.quantities.readings.Readings`.

    Raises:
        ValueError: the key is in use.
    """
    tiers = list(TIERS)  # from the smallest
    for entry in entries:
        if entry.key in QUANTITIES:
            raise ValueError(f"there is a quantity {entry.key!r} already")
        QUANTITIES[entry.key] = entry
        for tier in () if entry.by_name else tiers[tiers.index(entry.tier) :]:
            TIERS[tier] = (*TIERS[tier], entry.key)


def unregister(key: str) -> None:
    """Remove a quantity that was added."""
    del QUANTITIES[key]
    for tier, keys in TIERS.items():
        TIERS[tier] = tuple(other for other in keys if other != key)


for _module in (weights, features, attention, assumptions, laziness, optimizers, signals):
    register(*_module.ENTRIES)


_GRADIENTS = (
    "gradients are measured with the update only, as contribution; lightning.pytorch.utilities.grad_norm has norms"
)
_MEASURED_ELSEWHERE = {
    "grad_norm": _GRADIENTS,
    "gradient_norm": _GRADIENTS,
    "grad": _GRADIENTS,
    "gradients": _GRADIENTS,
}
"""Key that users try -> where it is measured instead."""


def resolve(quantities: str | Sequence[str]) -> tuple[str, ...]:
    """Return the keys of a user's argument ``quantities``, in the order of the registry.

    Args:
        quantities: a tier, ``"light"``, ``"standard"`` or ``"full"``, or a list of keys.

    Raises:
        ValueError: an unknown tier or key, or an empty list; the message lists valid ones.

    Example:
        >>> resolve(["update_norm", "weight_norm"])
        ('weight_norm', 'update_norm')
    """
    if isinstance(quantities, str):
        if quantities in TIERS:
            return TIERS[quantities]
        hint = f" (for a single quantity pass a list: [{quantities!r}])" if quantities in QUANTITIES else ""
        raise ValueError(f"quantities: unknown tier {quantities!r}{hint}; valid tiers: {', '.join(TIERS)}")
    if not isinstance(quantities, Iterable):
        raise ValueError(f"quantities must be a tier, {', '.join(TIERS)}, or a list of keys; got {quantities!r}")
    chosen = list(quantities)
    if not chosen:
        raise ValueError(f"no quantities given; valid tiers: {', '.join(TIERS)}; valid keys: {', '.join(QUANTITIES)}")
    for key in chosen:
        if key not in QUANTITIES:
            matches = difflib.get_close_matches(str(key), QUANTITIES, n=1)
            hint = f", did you mean {matches[0]!r}?" if matches else "."
            hint = f"; {_MEASURED_ELSEWHERE[key]}." if key in _MEASURED_ELSEWHERE else hint
            raise ValueError(f"quantities: unknown quantity {key!r}{hint} Valid keys: {', '.join(QUANTITIES)}")
    return tuple(key for key in QUANTITIES if key in set(chosen))


def needs(keys: Sequence[str]) -> frozenset[str]:
    """Return everything that must be captured for some quantities."""
    return frozenset().union(*(QUANTITIES[key].needs for key in keys))
