"""Layers that are not trained although most in equal places are: mistakes in the choice of parameters."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from os.path import commonprefix
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spectral_monitor.condition.row import Row

FEWEST = 3
"""From this number of layers in equal places on, such as repeated blocks, most of them show the intent for all."""
OTHERS = "the others"
"""Takes the place of a pattern of equal places if a layer has none."""
FRESH = 0.6
"""Least stable rank of a weight that was just drawn, over that of a Gaussian one: it is at least 1.02 after random
initialization, and 0.1 to 0.4 in trained networks.
"""
ABOUT_HALF = 0.4
"""If at least this part of a new network's matrices gets no gradient, they are not just unused."""
ROUNDED = 1e-5
"""Relative drift that is rounding: sharpness-aware minimization changes weights and puts them back at each step."""


def left_out(
    rows: Sequence[Row], is_out: Callable[[Row], bool], first: bool = True, last: bool = True
) -> dict[str, str]:
    """Return the layers that are left out and never moved while most in equal places move: name -> pattern of places.

    Layers in equal places have names that differ in numbers only, and the same shape.

    Args:
        rows: matrices in the order of the model.
        is_out: returns whether a layer is now left out of training.
        first, last: whether the first or the last layers in equal places count too.

    Example:
        >>> from spectral_monitor.condition.row import Row
        >>> from spectral_monitor.measurement import LayerInfo
        >>> infos = [LayerInfo(f"blocks.{k}.fc", "operator", 8, 8, (8, 8)) for k in range(4)]
        >>> moved = {"update_ratio": 0.01, "drift_ratio": 0.1}
        >>> rows = [Row(info, {"drift_ratio": 0.0} if info.name == "blocks.2.fc" else moved) for info in infos]
        >>> left_out(rows, lambda row: True)
        {'blocks.2.fc': 'blocks.*.fc'}
    """
    groups: dict[tuple[str, tuple[int, ...]], list[Row]] = defaultdict(list)
    for row in rows:
        groups[re.sub(r"\d+", "*", row.name), row.info.shape].append(row)
    patterns: dict[str, str] = {}
    for (pattern, _), group in groups.items():
        indices = [k for k, row in enumerate(group) if never_moved(row) and is_out(row)]
        moving = sum(row.get("update_ratio") > 0 for row in group)
        if not indices or len(group) < FEWEST or moving <= len(group) / 2:
            continue
        are_first, are_last = indices[-1] == len(indices) - 1, indices[0] == len(group) - len(indices)
        if (first or not are_first) and (last or not are_last):
            patterns |= {group[k].name: pattern for k in indices}
    return patterns


def never_moved(row: Row) -> bool:
    """Return whether a layer has its initial weights; one that began at zero has no relative drift."""
    return row.get("drift_ratio") < ROUNDED or row.get("weight_natural") == 0


def is_untrained(row: Row) -> bool:
    """Return whether a layer is frozen or in no known optimizer."""
    return row.settings.frozen or (row.settings.owner < 0 and math.isnan(row.lr))


def is_detached(row: Row) -> bool:
    """Return whether an optimizer holds a layer whose outputs are computed but get no gradient."""
    return row.is_trained and row.get("unused") == 1


def never_trained(rows: Sequence[Row], fresh: bool) -> dict[str, str]:
    """Return the layers, frozen ones too, that no optimizer trains although most in equal places are trained.

    They are returned as in :func:`left_out`. In a network that was trained before, the first or the last ones may be
    left out on purpose. Layers whose gradients no optimizer takes count too. If these are many, another network may
    serve as a loss, so only those count that were drawn at random or begin at zero. In a network that was trained
    before only those count, such as a new head, and only if most layers move.
    """
    moving = sum(row.get("update_ratio") > 0 for row in rows)
    forgotten = [row for row in rows if row.settings.forgotten and never_moved(row)]
    if not (fresh and len(forgotten) < moving):
        enough_move = moving > (0 if fresh else len(rows) / 2)
        forgotten = [
            row for row in forgotten if enough_move and (row.randomness > FRESH or row.get("weight_natural") == 0)
        ]
    return dict.fromkeys((row.name for row in forgotten), OTHERS) | left_out(rows, is_untrained, fresh, fresh)


def cut_off(rows: Sequence[Row]) -> frozenset[str]:
    """Return the layers that an optimizer holds but no gradient has reached, although other layers move.

    Four kinds count: two or more layers that include the first of the model; most of those that are trained, if they
    are all ahead of the first one that moves; about half of the layers of a new network; and layers in equal places if
    gradients reach most of them. A single layer, or the last ones in equal places, may just be unused.
    """
    unmoved = [row for row in rows if never_moved(row) and row.is_trained]
    detached = {row.name for row in unmoved if row.get("unused") == 1}
    # Layers whose calls cannot be seen, such as recurrent ones, may be unused: they only count with others, or if most
    # trained layers get no gradient.
    unobserved = {row.name for row in unmoved if math.isnan(row.get("unused")) and row.get("unseen") == 1}
    moving = [k for k, row in enumerate(rows) if row.get("update_ratio") > 0]
    ahead = {row.name for row in rows[: moving[0]] if row.is_trained} if moving else set()
    most_ahead = 2 * len(ahead) > sum(row.is_trained for row in rows) and ahead <= detached | unobserved
    names = detached | unobserved if detached or most_ahead else set()
    first_hidden = next((row.name for row in rows if row.info.role != "readout"), None)
    if not moving or len(names) < 2 or not (first_hidden in names or most_ahead):
        names = set()
    return frozenset(names) | _half_of_new(rows, detached) | left_out(rows, is_detached, last=False).keys()


def _half_of_new(rows: Sequence[Row], detached: Collection[str]) -> frozenset[str]:
    """Return the layers that no gradient reaches if they are about half of all and were just drawn.

    An optimizer that takes no steps does not count, such as that of an actor that waits for its critic, nor does a copy
    of a part that moves, such as a target network.
    """
    trained = [row for row in rows if row.is_trained]
    moving = {row.name: row for row in trained if row.get("update_ratio") > 0}
    owners = {row.settings.owner for row in moving.values()}
    unmoved = [row for row in trained if row.name in detached and row.settings.owner in owners]
    drawn = not any(row.dense and row.randomness <= FRESH for row in unmoved)
    if len(unmoved) < max(2, ABOUT_HALF * len(trained)) or not drawn or _is_copy(unmoved, moving):
        return frozenset()
    return frozenset(row.name for row in unmoved)


def _is_copy(part: Sequence[Row], others: Mapping[str, Row]) -> bool:
    """Return whether the layers of a part have the shapes of another part, and its names except for a prefix."""
    prefix = commonprefix([row.name for row in part])  # noqa: RUF071 - "target_a" and "target_b" share letters
    shapes = {row.name.removeprefix(prefix): row.info.shape for row in part}
    first = next(iter(shapes))
    other_prefixes = (name.removesuffix(first) for name in others if name.endswith(first))
    return any(
        all(other + end in others and others[other + end].info.shape == shape for end, shape in shapes.items())
        for other in other_prefixes
    )
