"""Networks of which most is frozen at the random values that it began with."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from spectral_monitor.condition.optimizers.left_out import FRESH, is_untrained, never_moved
from spectral_monitor.layers.naming import ADAPTED

if TYPE_CHECKING:
    from spectral_monitor.condition.row import Row

DRAWN = 0.95
"""Least stable rank of most weights that no step has changed, over that of Gaussian ones. The median is at least 1.02
after random initialization; after 300 steps of training some layers are below 0.9 and others below :data:`FRESH`.
"""
EQUAL = 1e-5
"""Norms that differ by less than this, relatively, are those of equal weights."""


def frozen_at_random(rows: Sequence[Row], vectors: Mapping[str, Row], copies: Collection[str]) -> tuple[Row, ...]:
    """Return the frozen matrices if they are most of the network and look freshly drawn; else none.

    Matrices in no optimizer count too, unless gradients reach them. These do not count:

    - matrices that were not called, which may be for another stage of training, if calls can be seen;
    - matrices of an optimizer that moves nothing, which may wait for their turn, as in a GAN;
    - copies of trained layers, such as target networks.

    If some frozen matrix or gain looks trained, all were probably loaded, and there are none. Nor are there any beside
    adapters of peft, whose base is frozen by design.

    Args:
        rows: matrices in the order of the model.
        vectors: biases and gains by name.
        copies: matrices that may be copies of trained layers, see :func:`copies_of_trained`.
    """
    dense = [row for row in rows if row.dense]
    moving = [row for row in rows if row.get("update_ratio") > 0]
    owners = {row.settings.owner for row in moving} | {-1}
    frozen = [
        row
        for row in dense
        if is_untrained(row)
        and not row.settings.forgotten
        and row.settings.owner in owners
        and row.get("drift_ratio") == 0
        and (row.get("feature_rms") >= 0 or row.get("unseen") == 1)
    ]
    if not moving or any(row.randomness < FRESH for row in frozen) or _looks_trained(vectors.values()):
        return ()
    if any(row.name.endswith(f".{ADAPTED}") for row in frozen):
        return ()
    drawn = tuple(row for row in frozen if row.randomness >= FRESH and row.name not in copies)
    return drawn if 2 * sum(row.randomness > DRAWN for row in drawn) > len(dense) else ()


def copies_of_trained(rows: Sequence[Row], at_start: bool = True) -> list[str]:
    """Return the matrices that do not move and may be copies of those that do, as target networks are.

    They have the shape of a moving matrix, and either its place in a part of another name, or its weights. Weights are
    compared by their norms, which a measurement takes before the step.

    Args:
        rows: matrices in the order of the model.
        at_start: whether this is the first step. Later, moving layers have left the weights that others may have
            copied, so those of the same shape may all be copies.

    Example:
        >>> from spectral_monitor.condition.row import Row
        >>> from spectral_monitor.measurement import LayerInfo
        >>> sizes = {"actor.fc": 1.0, "target.fc": 1.0, "blocks.0": 2.0, "blocks.1": 2.1}
        >>> moved = {"actor.fc": 0.1, "blocks.0": 0.1}
        >>> infos = [LayerInfo(name, "operator", 8, 8, (8, 8)) for name in sizes]
        >>> rows = [
        ...     Row(info, {"weight_fro": sizes[info.name], "drift_ratio": moved.get(info.name, 0.0)}) for info in infos
        ... ]
        >>> copies_of_trained(rows)
        ['target.fc']
    """
    moving = [row for row in rows if not never_moved(row)]
    still = [row for row in rows if never_moved(row)]
    return [row.name for row in still if any(_may_copy(row, other, at_start) for other in moving)]


def _may_copy(row: Row, other: Row, at_start: bool) -> bool:
    """Return whether a matrix may be a copy of another one."""
    if row.info.shape != other.info.shape or not at_start:
        return row.info.shape == other.info.shape
    same_weight = all(
        math.isclose(row.get(key), other.get(key), rel_tol=EQUAL)
        for key in ("weight_fro", "weight_natural")
        if not math.isnan(row.get(key))
    )
    pattern, other_pattern = (re.sub(r"\d+", "*", name) for name in (row.name, other.name))
    same_end = row.name.rpartition(".")[2] == other.name.rpartition(".")[2]
    return same_weight or (pattern != other_pattern and same_end)


def _looks_trained(vectors: Iterable[Row]) -> bool:
    """Return whether there are frozen gains, such as those of norms, and none of them is 1 or 0 any more."""
    gains = [row.get("weight_natural") for row in vectors if row.settings.frozen and row.name.endswith(".weight")]
    return bool(gains) and not any(gain == 0 or math.isclose(gain, 1, rel_tol=EQUAL) for gain in gains)
