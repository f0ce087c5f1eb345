"""Families of layers: those at the same place in every block of a deep network."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

OTHERS = "others"
"""Layers without a number in their name."""


def family_of(name: str, alone: str = OTHERS) -> str:
    """Return the name with its first number, mostly that of a block, taken out; ``alone`` where it has none.

    Example:
        >>> family_of("blocks.3.mlp.0"), family_of("net.4"), family_of("head")
        ('blocks.*.mlp.0', 'net.*', 'others')
    """
    parts = name.split(".")
    place = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    if place is None:
        return alone
    return ".".join([*parts[:place], "*", *parts[place + 1 :]])


def families_of(names: Sequence[str]) -> dict[str, list[int]]:
    """Return family -> places of its layers, in the order of the network; families of one layer are among the others.

    Example:
        >>> families_of(["tokens", "blocks.0.mlp", "blocks.1.mlp", "head"])
        {'blocks.*.mlp': [1, 2], 'others': [0, 3]}
    """
    found: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        found.setdefault(family_of(name), []).append(i)
    single = [i for of, some in found.items() if len(some) == 1 or of == OTHERS for i in some]
    several = {of: some for of, some in found.items() if len(some) > 1 and of != OTHERS}
    return several | ({OTHERS: sorted(single)} if single else {})


def folded_names(names: Sequence[str]) -> list[str]:
    """Return the names with each family as one, and how many they are, in the order of the first.

    Example:
        >>> folded_names(["tokens", *(f"h.{i}.mlp" for i in range(12)), "head"])
        ['tokens', 'h.*.mlp x12', 'head']
    """
    found = families_of(names)
    single = found.pop(OTHERS, [])
    texts = {places[0]: f"{of} x{len(places)}" for of, places in found.items()} | {i: names[i] for i in single}
    return [text for _, text in sorted(texts.items())]


def places_in(names: Sequence[str]) -> str:
    """Return the first numbers of the names, runs of them as ``first..last``.

    Example:
        >>> places_in([f"h.{i}.mlp" for i in (0, 1, 2, 5, 7, 8)])
        '0..2,5,7,8'
    """
    numbers = [int(next(part for part in name.split(".") if part.isdigit())) for name in names]
    # In a run, every number is as far from its place.
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ",".join(f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)
