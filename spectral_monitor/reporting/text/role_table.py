"""The table of a model before training: its matrices, their roles, and parameters that are not measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from spectral_monitor.layers.inspect_model import PART_OF
from spectral_monitor.messages import joined
from spectral_monitor.reporting.content.families import block_numbers, family_of, folded_names
from spectral_monitor.reporting.content.labels import measured_parts, role_name, unprefixed
from spectral_monitor.reporting.text.folding import MAX_UNFOLDED_LAYERS
from spectral_monitor.reporting.text.lines import (
    NO_FEATURES,
    NOT_MEASURED,
    Table,
    printable,
    reason_lines,
    text_column,
)
from spectral_monitor.reporting.text.table import WIDTH, fans

if TYPE_CHECKING:
    from spectral_monitor.layers import Anatomy, Layer

MAX_NAMES = 6
"""The most names in a line on parameters that are not measured for the same reason."""


def role_table(anatomy: Anatomy, folded: bool = True, width: int | None = WIDTH) -> str:
    """Return the table of :func:`role_rows` as plain text; ``width``: characters of a line, ``None`` for no limit."""
    return role_rows(anatomy, folded).plain(width)


def role_rows(anatomy: Anatomy, folded: bool = True, when: str = "") -> Table:
    """Return a table with a row for each matrix; below it, what is not measured, and why.

    Args:
        folded: whether the layers of a family share a row, in networks of more than 16 matrices.
        when: the measured steps, in words.
    """
    matrices = [layer for layer in anatomy.layers if layer.is_matrix]
    parts = measured_parts(len(matrices), len(anatomy.layers) - len(matrices))
    title = f"spectral monitor: {parts} are measured"
    names = [layer.info.name for layer in matrices]
    if folded:
        bare = unprefixed(tuple(names))
        names = [bare[name] for name in names]
    groups = [[i] for i in range(len(matrices))]
    if folded and len(matrices) > MAX_UNFOLDED_LAYERS:
        groups = _groups(matrices, names)
    columns = []
    if matrices:
        first = [matrices[group[0]] for group in groups]
        columns = [
            text_column("layer", [_label([names[i] for i in group], names) for group in groups]),
            text_column("", [f"x{len(group)}" if len(group) > 1 else "" for group in groups]),
            text_column("role", [role_name(layer.info.role) for layer in first]),
            text_column("in -> out", [fans(layer.info) for layer in first]),
            text_column("note", [layer.note for layer in first]),
        ]
        if any(layer.info.placement != "local" for layer in first):
            columns.insert(4, text_column("placement", [layer.info.placement for layer in first]))
        columns = [column for column in columns if column.title == "layer" or any(column.cells)]
    featureless = [(name, layer.no_features) for name, layer in zip(names, matrices, strict=True) if layer.no_features]
    foot = (*_nodes(anatomy), *reason_lines(NO_FEATURES, featureless, _listed), *_unmeasured(anatomy))
    return Table(title, tuple(columns), foot, notes=(when,) if when else ())


def _groups(matrices: Sequence[Layer], names: Sequence[str]) -> list[list[int]]:
    """Return the indices of matrices that share a row: a family whose members are described by the same words."""
    groups: dict[object, list[int]] = {}
    for i, layer in enumerate(matrices):
        info = layer.info
        family = family_of(names[i], alone=names[i])
        cells = (family, info.role, info.fan_in, info.fan_out, info.blocks, info.placement, layer.note)
        groups.setdefault(cells, []).append(i)
    return list(groups.values())


def _label(group: Sequence[str], names: Sequence[str]) -> str:
    """Return the label of a row: ``h.*.mlp``, or ``net.{2,4}`` if other members of the family have their own rows."""
    if len(group) == 1:
        return group[0]
    family = family_of(group[0])
    if sum(family_of(name) == family for name in names) == len(group):
        return family
    return family.replace("*", f"{{{block_numbers(group)}}}", 1)


def _nodes(anatomy: Anatomy) -> list[str]:
    """Return the lines on modules of which only features are measured, and why these are missing, if they are."""
    names = [layer.info.name for layer in anatomy.nodes]
    if not names:
        return []
    notes = sorted({f": {layer.no_features}" for layer in anatomy.nodes if layer.no_features})
    return [printable(f"outputs of modules, features only ({len(names)}): {_listed(names)}"), *notes]


def _unmeasured(anatomy: Anatomy) -> list[str]:
    """Return the lines on parameters that have no row, by reason."""
    parts = [item.name for item in anatomy.unmeasured if item.reason.startswith(PART_OF)]
    others = [(item.name, item.reason) for item in anatomy.unmeasured if not item.reason.startswith(PART_OF)]
    lines = [printable(f"parts of weights that are measured ({len(parts)}): {_listed(parts)}")] if parts else []
    return lines + reason_lines(NOT_MEASURED, others, _listed)


def _listed(names: Sequence[str]) -> str:
    """Return names for a line, the layers of a family together."""
    return joined(folded_names(names), MAX_NAMES)
