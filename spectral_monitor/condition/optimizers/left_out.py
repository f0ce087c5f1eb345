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
"""Smallest number of layers in equal places, such as repeated blocks, of which most tell how all are meant."""
OTHERS = "the others"
"""Stands for equal places where a layer has none."""
FRESH = 0.6
"""Limit of the stable rank of the median weight over that of a Gaussian one. Weights that were just drawn have 1.02 and
more, those of trained networks 0.1 to 0.4.
"""
ABOUT_HALF = 0.4
"""If at least this part of a new network's matrices gets no gradient, they are no spare ones."""
ROUNDED = 1e-5
"""Relative drift that is rounding: sharpness-aware minimization changes weights and puts them back at each step."""


def left_out(
    rows: Sequence[Row], is_out: Callable[[Row], bool], first: bool = True, last: bool = True
) -> dict[str, str]:
    """Return the layers that are out and never moved while most in equal places move: name -> pattern of these places.

    Equal places have names that differ in numbers only, and shapes that do not.

    Args:
        rows: matrices in the order of the model.
        is_out: tells whether a layer is left out of training now.
        first, last: whether the first ones, or the last ones, of equal places count too.

    Example:
        >>> from spectral_monitor.condition.row import Row
        >>> from spectral_monitor.measurement import LayerInfo
        >>> infos = [LayerInfo(f"blocks.{k}.fc", "operator", 8, 8, (8, 8)) for k in range(4)]
        >>> moved = {"update_ratio": 0.01, "drift_ratio": 0.1}
        >>> rows = [Row(info, {"drift_ratio": 0.0} if info.name == "blocks.2.fc" else moved) for info in infos]
        >>> left_out(rows, lambda row: True)
        {'blocks.2.fc': 'blocks.*.fc'}
    """
    places: dict[tuple[str, tuple[int, ...]], list[Row]] = defaultdict(list)
    for row in rows:
        places[re.sub(r"\d+", "*", row.name), row.info.shape].append(row)
    found: dict[str, str] = {}
    for (pattern, _), same in places.items():
        out = [k for k, row in enumerate(same) if never_moved(row) and is_out(row)]
        moving = sum(row.get("update_ratio") > 0 for row in same)
        if not out or len(same) < FEWEST or moving <= len(same) / 2:
            continue
        are_first, are_last = out[-1] == len(out) - 1, out[0] == len(same) - len(out)
        if (first or not are_first) and (last or not are_last):
            found |= {same[k].name: pattern for k in out}
    return found


def never_moved(row: Row) -> bool:
    """Return whether a layer has its initial weights; one that began at zero has no relative drift."""
    return row.get("drift_ratio") < ROUNDED or row.get("weight_natural") == 0


def is_untrained(row: Row) -> bool:
    """Return whether a layer is frozen, or no optimizer is known to hold it."""
    return row.settings.frozen or (row.settings.owner < 0 and math.isnan(row.lr))


def is_detached(row: Row) -> bool:
    """Return whether an optimizer holds a layer whose outputs are computed, but no gradient comes back."""
    return row.is_trained and row.get("unused") == 1


def never_trained(rows: Sequence[Row], fresh: bool) -> dict[str, str]:
    """Return the layers, frozen ones too, that no optimizer trains although most in equal places are trained.

    In a network that was trained before, the first or the last ones may be left out on purpose. Layers whose
    gradients no optimizer takes count too. If these are many, only those count that were drawn at random or begin at
    zero: another network may serve as a loss. In a network that was trained before only those count, as a new head,
    and only where most layers move.

    Args:
        rows: matrices in the order of the model.
        fresh: whether the network is a new one.

    Returns:
        Name -> pattern of equal places.
    """
    moving = sum(row.get("update_ratio") > 0 for row in rows)
    forgotten = [row for row in rows if row.settings.forgotten and never_moved(row)]
    enough = moving > (0 if fresh else len(rows) / 2)
    drawn = [row for row in forgotten if enough and (row.randomness > FRESH or row.get("weight_natural") == 0)]
    told = forgotten if fresh and len(forgotten) < moving else drawn
    among = dict.fromkeys((row.name for row in told), OTHERS)
    return among | left_out(rows, is_untrained, first=fresh, last=fresh)


def cut_off(rows: Sequence[Row]) -> frozenset[str]:
    """Return layers that an optimizer holds but no gradient has reached, although other layers move.

    Four kinds count: two or more layers that include the first of the model; most of those that are trained, if they
    are all ahead of the first one that moves; about half of the layers of a new network; and layers in places where
    gradients reach most others. A single layer, or the last ones in equal places, may just be unused.

    Args:
        rows: matrices in the order of the model.
    """
    still = [row for row in rows if never_moved(row) and row.is_trained]
    used = {row.name for row in still if row.get("unused") == 1}
    # Layers whose calls cannot be seen, such as recurrent ones, may be unused: they count beside others, or if most do.
    also = {row.name for row in still if math.isnan(row.get("unused")) and row.get("unseen") == 1}
    hidden = [row for row in rows if row.info.role != "readout"]
    moving = [k for k, row in enumerate(rows) if row.get("update_ratio") > 0]
    ahead = {row.name for row in rows[: moving[0]] if row.is_trained} if moving else set()
    most_ahead = 2 * len(ahead) > sum(row.is_trained for row in rows) and ahead <= used | also
    names = used | also if used or most_ahead else set()
    first = bool(hidden) and hidden[0].name in names
    found = names if moving and (first or most_ahead) and len(names) > 1 else set()
    return frozenset(found) | _half_of_new(rows, used) | left_out(rows, is_detached, last=False).keys()


def _half_of_new(rows: Sequence[Row], used: Collection[str]) -> frozenset[str]:
    """Return the layers that no gradient reaches if these are about half of all and were just drawn.

    It returns none while the optimizer takes no steps, as of an actor that waits for its critic, and none for a copy of
    a part that moves, such as a target network.
    """
    held = [row for row in rows if row.is_trained]
    moving = {row.name: row for row in held if row.get("update_ratio") > 0}
    owners = {row.settings.owner for row in moving.values()}
    still = [row for row in held if row.name in used and row.settings.owner in owners]
    drawn = not any(row.dense and row.randomness <= FRESH for row in still)
    if len(still) < max(2, ABOUT_HALF * len(held)) or not drawn or _is_copy(still, moving):
        return frozenset()
    return frozenset(row.name for row in still)


def _is_copy(part: Sequence[Row], others: Mapping[str, Row]) -> bool:
    """Return whether the layers of a part have the shapes of another part, and its names except for a prefix."""
    prefix = commonprefix([row.name for row in part])  # noqa: RUF071 - "target_a" and "target_b" begin alike
    ends = {row.name.removeprefix(prefix): row.info.shape for row in part}
    (some, shape), *_ = ends.items()
    begins = (name.removesuffix(some) for name in others if name.endswith(some) and others[name].info.shape == shape)
    return any(
        all(begin + end in others and others[begin + end].info.shape == ends[end] for end in ends) for begin in begins
    )
