"""Short names of layers beside pictures, which keep what distinguishes them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from spectral_monitor.measurement import ROLE_NAMES
from spectral_monitor.quantities import QUANTITIES

MAX_NAME_LENGTH = 30
"""Characters of a layer's name beside a picture; tables and tooltips have the full name."""
MAX_PART_LENGTH = 9
"""Characters of a name's part; longer ones are split into words."""
GAP = "…"
_PART = re.compile(r"\.?[^.]+|\.+")
_WORD = re.compile(r"[\W_]*(?:\d+|[^\W\d_]+)|[\W_]+")


def role_name(role: str) -> str:
    """Return the name of a role in displays.

    Example:
        >>> role_name("operator"), role_name("readout")
        ('hidden', 'output')
    """
    return ROLE_NAMES.get(role, role)


def quantity_title(key: str) -> str:
    """Return the title of a quantity, or its key if it has none; the key of a value of the whole network as words.

    Example:
        >>> quantity_title("feature_rms"), quantity_title("readout_share")
        ('size of the outputs', 'readout share')
    """
    return QUANTITIES[key].title or key if key in QUANTITIES else key.replace("_", " ")


def titles_of(key: str) -> list[str]:
    """Return the title of a quantity's chart, then the line below it: key and unit. Without a title, only that line.

    Example:
        >>> titles_of("weight_natural"), titles_of("weight_norm")
        (['weight size', 'weight_natural, RMS / RMS'], ['weight_norm, output / input'])
    """
    entry = QUANTITIES[key]
    return [entry.title, entry.counted_in] if entry.title else [entry.counted_in]


@lru_cache(maxsize=8)  # the layers are the same in every picture
def shortened(names: tuple[str, ...], length: int = MAX_NAME_LENGTH) -> dict[str, str]:
    """Return name -> the name, or the parts that distinguish it from the others; no two results are equal.

    Numbers that differ and the ``*`` of a family are kept first, then the most distinctive parts, then the end. Names
    that differ only in numbers, or in their last part, are cut in the same way. The order of the names does not matter.

    ``length``: characters of a result, at most; more only if two results would be equal.

    Example:
        >>> names = ("head", *(f"bert.encoder.layer.{i}.attention.self.query" for i in range(12)))
        >>> list(shortened(names).values())[-2:]
        ['bert…10.attention.self.query', 'bert…11.attention.self.query']
    """
    units = {name: _units(name) for name in names}
    prefixes = Counter(tuple(parts[:k]) for parts in units.values() for k in range(len(parts) + 1))
    families: dict[tuple[int, tuple[str, ...]], list[str]] = {}
    for name, parts in units.items():
        shape = tuple("#" if _word(unit).isdigit() else unit for unit in parts[:-1])
        families.setdefault((len(parts), shape), []).append(name)
    short: dict[str, str] = {}
    ambiguous = list(families.values())
    while ambiguous:
        for family in ambiguous:
            short |= zip(family, _shortened_family([units[name] for name in family], prefixes, length), strict=True)
        count = Counter(short.values())
        ambiguous = [family for family in ambiguous if any(count[short[name]] > 1 for name in family)]
        length += 1
    return {name: short[name] for name in names}


def labelled(names: tuple[str, ...]) -> dict[str, str]:
    """Return name -> label beside pictures: without the prefix that all names share, then shortened.

    Example:
        >>> list(labelled(("model.decoder.h.0.mlp.c_fc", "model.decoder.h.1.mlp.c_fc", "model.head")).values())
        ['h.0.mlp.c_fc', 'h.1.mlp.c_fc', 'head']
    """
    bare = unprefixed(names)
    short = shortened(tuple(bare.values()))
    return {name: short[bare[name]] for name in names}


@lru_cache(maxsize=8)
def unprefixed(names: tuple[str, ...]) -> dict[str, str]:
    """Return name -> the name without the first parts, if every name of several parts has the same ones.

    Names of one part, such as ``lm_head``, do not count. No result begins with a number or equals another one.

    Example:
        >>> list(unprefixed(("model.decoder.h.0.mlp", "model.decoder.wte", "model.lm_head")).values())
        ['h.0.mlp', 'wte', 'lm_head']
        >>> list(unprefixed(("net.0", "net.2")))
        ['net.0', 'net.2']
    """
    short = {name: name.split(".") for name in names}
    while True:
        dotted = [parts for parts in short.values() if len(parts) > 1]
        if 2 * len(dotted) <= len(names) or len({parts[0] for parts in dotted}) > 1:
            break
        shorter = {name: parts[1:] if len(parts) > 1 else parts for name, parts in short.items()}
        if any(parts[0].isdigit() for parts in shorter.values()) or len(set(map(tuple, shorter.values()))) < len(names):
            break
        short = shorter
    return {name: ".".join(parts) for name, parts in short.items()}


def rows_with_names(is_off: Sequence[bool], limit: int) -> list[int]:
    """Return the rows whose names are shown: as many as fit; rows that are off come first, then the last row.

    Example:
        >>> rows_with_names([False, False, True, False, False, False], 3)
        [0, 2, 5]
        >>> rows_with_names([False, True, True, False, False, False], 3)
        [1, 5]
    """
    rows = range(len(is_off))
    spacing = math.ceil(len(rows) / max(limit, 1)) or 1
    chosen: list[int] = []
    for i in [*(i for i in rows if is_off[i]), *rows[-1:], *rows[::spacing]]:
        if all(abs(i - k) >= spacing for k in chosen):
            chosen.append(i)
    return sorted(chosen)


def _units(name: str) -> list[str]:
    """Return the parts of a name, long ones word by word, each with its separator in front."""
    parts = _PART.findall(name)
    return [unit for part in parts for unit in (_WORD.findall(part) if len(part) > MAX_PART_LENGTH else [part])]


def _word(unit: str) -> str:
    """Return a unit without its separator."""
    return unit.lstrip("._-/ ") or unit


def _shortened_family(family: Sequence[list[str]], prefixes: Counter[tuple[str, ...]], length: int) -> list[str]:
    """Cut names of one shape in the same way: the most distinctive units stay, as long as all names fit.

    Args:
        family: the units of each name, equally many.
        prefixes: first units -> number of names that begin with them. The fewer of them a unit leaves, the more
            distinctive it is.
    """
    if all(len("".join(units)) <= length for units in family):
        return ["".join(units) for units in family]
    positions = range(len(family[0]))
    distinction = [
        max(prefixes[tuple(units[:k])] / prefixes[tuple(units[: k + 1])] for units in family) for k in positions
    ]
    words = [[_word(units[k]) for units in family] for k in positions]
    is_number = ["*" in words[k] or (distinction[k] > 1 and any(map(str.isdigit, words[k]))) for k in positions]
    kept: set[int] = set()
    for k in sorted(positions, key=lambda k: (is_number[k], distinction[k], k), reverse=True):
        if not kept or all(len(_with_gaps(units, kept | {k})) <= length for units in family):
            kept.add(k)
        elif distinction[k] == 1:  # all names have it: keep as much of the end as fits, nothing before it
            break
    return [_cut(_with_gaps(units, kept), length) for units in family]


def _with_gaps(units: Sequence[str], kept: set[int]) -> str:
    """Return the kept units as a text, with a gap for each run of units that is left out."""
    text = ""
    for k, unit in enumerate(units):
        if k in kept:
            text += _word(unit) if text.endswith(GAP) else unit
        elif not text.endswith(GAP):
            text += GAP
    return text


def _cut(text: str, length: int) -> str:
    """Cut a text in the middle; more of its end stays, because that is more distinctive."""
    start = length // 3
    return text if len(text) <= length else f"{text[:start]}{GAP}{text[len(text) - max(0, length - start - 1) :]}"


def measured_parts(matrices: int, vectors: int) -> str:
    """Return the numbers of measured parameters in words.

    Example:
        >>> measured_parts(2, 0), measured_parts(1, 1)
        ('2 matrices and 0 biases and gains', '1 matrix and 1 bias or gain')
    """
    first = "1 matrix" if matrices == 1 else f"{matrices} matrices"
    return f"{first} and " + ("1 bias or gain" if vectors == 1 else f"{vectors} biases and gains")
