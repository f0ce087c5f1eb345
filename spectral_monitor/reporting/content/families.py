"""Families of layers: the same layer in every block of a deep network."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

OTHERS = "others"
"""Layers without a number in their name."""


def family_of(name: str, alone: str = OTHERS) -> str:
    """Return the name with ``*`` for its first number, mostly that of a block; ``alone`` if it has none.

    Example:
        >>> family_of("blocks.3.mlp.0"), family_of("net.4"), family_of("head")
        ('blocks.*.mlp.0', 'net.*', 'others')
    """
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join([*parts[:i], "*", *parts[i + 1 :]])
    return alone


def families_of(names: Sequence[str]) -> dict[str, list[int]]:
    """Return family -> indices of its layers, in the order of the network; layers without a family are the others.

    Example:
        >>> families_of(["tokens", "blocks.0.mlp", "blocks.1.mlp", "head"])
        {'blocks.*.mlp': [1, 2], 'others': [0, 3]}
    """
    groups: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        groups.setdefault(family_of(name), []).append(i)
    families = {family: indices for family, indices in groups.items() if len(indices) > 1 and family != OTHERS}
    members = {i for indices in families.values() for i in indices}
    singles = [i for i in range(len(names)) if i not in members]
    return families | ({OTHERS: singles} if singles else {})


def folded_names(names: Sequence[str]) -> list[str]:
    """Return the names with each family as one, with its size, in the order of first members.

    Example:
        >>> folded_names(["tokens", *(f"h.{i}.mlp" for i in range(12)), "head"])
        ['tokens', 'h.*.mlp x12', 'head']
    """
    families = families_of(names)
    texts = {i: names[i] for i in families.pop(OTHERS, [])}
    texts |= {indices[0]: f"{family} x{len(indices)}" for family, indices in families.items()}
    return [text for _, text in sorted(texts.items())]


def block_numbers(names: Sequence[str]) -> str:
    """Return the first number of each name, consecutive ones as ``first..last``.

    Example:
        >>> block_numbers([f"h.{i}.mlp" for i in (0, 1, 2, 5, 7, 8)])
        '0..2,5,7,8'
    """
    numbers = [int(next(part for part in name.split(".") if part.isdigit())) for name in names]
    # Consecutive numbers differ from their index by the same amount.
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ",".join(f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)
