"""Names of layers beside pictures: short, and told apart by what they differ in."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from spectral_monitor.measurement import ROLE_NAMES

NAME = 30
"""Characters of a layer's name beside a picture; all of them are in tables and in what the mouse shows."""
LONG = 9
"""Parts of a name beyond this are taken word by word."""
GAP = "…"
_PART = re.compile(r"\.?[^.]+|\.+")
_WORD = re.compile(r"[\W_]*(?:\d+|[^\W\d_]+)|[\W_]+")


def role_name(role: str) -> str:
    """Return what a role is called in displays.

    Example:
        >>> role_name("operator"), role_name("readout")
        ('hidden', 'output')
    """
    return ROLE_NAMES.get(role, role)


@lru_cache(maxsize=8)  # the layers are the same in every picture
def shortened(names: tuple[str, ...], room: int = NAME) -> dict[str, str]:
    """Return each name, or what distinguishes it from the others; all results differ, in any order.

    Numbers that differ stay, and the ``*`` of a family; then the parts that tell most among these names, then the end.
    Names that differ only in numbers, or in their last part, are cut alike. They are longer than asked for only where
    they would be the same.

    Args:
        names: of all layers that are shown.
        room: characters.

    Example:
        >>> names = ("head", *(f"bert.encoder.layer.{i}.attention.self.query" for i in range(12)))
        >>> list(shortened(names).values())[-2:]
        ['bert…10.attention.self.query', 'bert…11.attention.self.query']
    """
    units = {name: _units(name) for name in names}
    under = Counter(tuple(found[:k]) for found in units.values() for k in range(len(found) + 1))
    families: dict[tuple[int, tuple[str, ...]], list[str]] = {}
    for name, found in units.items():
        shape = tuple("#" if _word(unit).isdigit() else unit for unit in found[:-1])
        families.setdefault((len(found), shape), []).append(name)
    short: dict[str, str] = {}
    alike = list(families.values())
    while alike:
        for family in alike:
            short |= zip(family, _together([units[name] for name in family], under, room), strict=True)
        count = Counter(short.values())
        alike = [family for family in alike if any(count[short[name]] > 1 for name in family)]
        room += 1
    return {name: short[name] for name in names}


def labelled(names: tuple[str, ...]) -> dict[str, str]:
    """Return what each layer is called beside pictures: first without what all share, then shortened.

    Example:
        >>> list(labelled(("model.decoder.h.0.mlp.c_fc", "model.decoder.h.1.mlp.c_fc", "model.head")).values())
        ['h.0.mlp.c_fc', 'h.1.mlp.c_fc', 'head']
    """
    bare = unprefixed(names)
    short = shortened(tuple(bare.values()))
    return {name: short[bare[name]] for name in names}


@lru_cache(maxsize=8)
def unprefixed(names: tuple[str, ...]) -> dict[str, str]:
    """Return each name without the parts in front that say nothing, because every name of several parts has them.

    Names of one part, such as ``lm_head``, do not count. A name neither begins with a number nor becomes that of
    another layer.

    Example:
        >>> list(unprefixed(("model.decoder.h.0.mlp", "model.decoder.wte", "model.lm_head")).values())
        ['h.0.mlp', 'wte', 'lm_head']
        >>> list(unprefixed(("net.0", "net.2")))
        ['net.0', 'net.2']
    """
    short = {name: name.split(".") for name in names}
    while True:
        several = [parts for parts in short.values() if len(parts) > 1]
        if 2 * len(several) <= len(names) or len({parts[0] for parts in several}) > 1:
            break
        shorter = {name: parts[1:] if len(parts) > 1 else parts for name, parts in short.items()}
        if any(parts[0].isdigit() for parts in shorter.values()) or len(set(map(tuple, shorter.values()))) < len(names):
            break
        short = shorter
    return {name: ".".join(parts) for name, parts in short.items()}


def named(outside: Sequence[bool], room: int) -> list[int]:
    """Return the rows whose names are written: as many as fit, those that are outside and the last one first.

    Example:
        >>> named([False, False, True, False, False, False], 3)
        [0, 2, 5]
        >>> named([False, True, True, False, False, False], 3)
        [1, 5]
    """
    every = range(len(outside))
    apart = math.ceil(len(every) / max(room, 1)) or 1
    chosen: list[int] = []
    for i in [*(i for i in every if outside[i]), *every[-1:], *every[::apart]]:
        if all(abs(i - k) >= apart for k in chosen):
            chosen.append(i)
    return sorted(chosen)


def _units(name: str) -> list[str]:
    """Return the parts of a name, long ones word by word, each with the dot or the like before it."""
    return [unit for part in _PART.findall(name) for unit in (_WORD.findall(part) if len(part) > LONG else [part])]


def _word(unit: str) -> str:
    """Return a unit without the dot before it."""
    return unit.lstrip("._-/ ") or unit


def _together(family: Sequence[list[str]], under: Counter[tuple[str, ...]], room: int) -> list[str]:
    """Cut names of one shape alike to some characters: what tells most comes in first, as long as all have room for it.

    ``family``: the units of each name, equally many. ``under``: how many names begin with some units; what a unit tells
    is how many of them it leaves.
    """
    if all(len("".join(units)) <= room for units in family):
        return ["".join(units) for units in family]
    places = range(len(family[0]))
    left = [[under[tuple(units[:k])] / under[tuple(units[: k + 1])] for units in family] for k in places]
    words = [[_word(units[k]) for units in family] for k in places]
    number = ["*" in words[k] or (max(left[k]) > 1 and any(map(str.isdigit, words[k]))) for k in places]
    kept: set[int] = set()
    for k in sorted(places, key=lambda k: (number[k], max(left[k]), k), reverse=True):
        if not kept or all(len(_joined(units, kept | {k})) <= room for units in family):
            kept.add(k)
        elif max(left[k]) == 1:  # in all of them: the end as far as it goes, no scraps from before it
            break
    return [_cut(_joined(units, kept), room) for units in family]


def _joined(units: Sequence[str], kept: set[int]) -> str:
    """Return the kept units as a text, with a gap for each run of units that is left out."""
    text = ""
    for k, unit in enumerate(units):
        if k in kept:
            text += _word(unit) if text.endswith(GAP) else unit
        elif not text.endswith(GAP):
            text += GAP
    return text


def _cut(text: str, room: int) -> str:
    """Cut a text in the middle, where there is nothing else to leave out; of both ends the last tells more."""
    start = room // 3
    return text if len(text) <= room else f"{text[:start]}{GAP}{text[len(text) - max(0, room - start - 1) :]}"


def measured_parts(matrices: int, vectors: int) -> str:
    """Return what is measured of a model.

    Example:
        >>> measured_parts(2, 0), measured_parts(1, 1)
        ('2 matrices and 0 biases and gains', '1 matrix and 1 bias or gain')
    """
    first = "1 matrix" if matrices == 1 else f"{matrices} matrices"
    return f"{first} and " + ("1 bias or gain" if vectors == 1 else f"{vectors} biases and gains")
