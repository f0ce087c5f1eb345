"""Layers that are alike: the same place in every block of a deep network."""

from __future__ import annotations

from collections.abc import Sequence

OTHERS = "others"
"""Layers without a number in their name."""


def kind(name: str) -> str:
    """The name with its first number, mostly that of a block, taken out.

    Example:
        >>> kind("blocks.3.mlp.0"), kind("net.4"), kind("head")
        ('blocks.*.mlp.0', 'net.*', 'others')
    """
    parts = name.split(".")
    place = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    if place is None:
        return OTHERS
    return ".".join([*parts[:place], "*", *parts[place + 1 :]])


def kinds(names: Sequence[str]) -> dict[str, list[int]]:
    """Kind -> places of its layers, in the order of the network; kinds of one layer are among the others.

    Example:
        >>> kinds(["tokens", "blocks.0.mlp", "blocks.1.mlp", "head"])
        {'blocks.*.mlp': [1, 2], 'others': [0, 3]}
    """
    found: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        found.setdefault(kind(name), []).append(i)
    single = [i for of, some in found.items() if len(some) == 1 or of == OTHERS for i in some]
    several = {of: some for of, some in found.items() if len(some) > 1 and of != OTHERS}
    return several | ({OTHERS: sorted(single)} if single else {})


def folded(names: Sequence[str]) -> list[str]:
    """Return the names with equal places of the blocks as one, and how many they are, in the order of the first.

    Example:
        >>> folded(["tokens", *(f"h.{i}.mlp" for i in range(12)), "head"])
        ['tokens', 'h.*.mlp x12', 'head']
    """
    found = kinds(names)
    single = found.pop(OTHERS, [])
    texts = {places[0]: f"{of} x{len(places)}" for of, places in found.items()} | {i: names[i] for i in single}
    return [text for _, text in sorted(texts.items())]
