"""The table of a model before training: its matrices, their roles, and what is not measured and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from spectral_monitor.layers.inspect_model import PART_OF
from spectral_monitor.layers.output_layers import BY_PLACE
from spectral_monitor.messages import some
from spectral_monitor.reporting.content.families import family_of, folded_names, places_in
from spectral_monitor.reporting.content.labels import measured_parts, role_name, unprefixed
from spectral_monitor.reporting.text.folding import MAX_UNFOLDED_LAYERS
from spectral_monitor.reporting.text.lines import Table, printable, text_column, unmeasured_lines
from spectral_monitor.reporting.text.table import WIDTH, fans

if TYPE_CHECKING:
    from spectral_monitor.layers import Anatomy, Layer

NOTES = {BY_PLACE: "guessed: the last matrix"}
"""Notes on layers, in fewer words."""
MAX_NAMES = 6
"""Parameters that are not measured for the same reason, of which the names are given."""


def role_table(anatomy: Anatomy, folded: bool = True, width: int | None = WIDTH) -> str:
    """Return the table of :func:`role_rows` as plain text of a width; ``None`` for no limit."""
    return role_rows(anatomy, folded).plain(width)


def role_rows(anatomy: Anatomy, folded: bool = True, when: str = "") -> Table:
    """Return a row for each matrix; below, what is not measured and why.

    Args:
        folded: whether equal places of the blocks share a row, in networks of more than 16 matrices.
        when: at which steps is measured, in words.
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
            text_column("note", [NOTES.get(layer.note, layer.note) for layer in first]),
        ]
        if any(layer.info.placement != "local" for layer in first):
            columns.insert(4, text_column("placement", [layer.info.placement for layer in first]))
        columns = [column for column in columns if column.title == "layer" or any(column.cells)]
    foot = (*_nodes(anatomy), *_unmeasured(anatomy))
    return Table(title, tuple(columns), foot, notes=(when,) if when else ())


def _groups(matrices: Sequence[Layer], names: Sequence[str]) -> list[list[int]]:
    """Return the places of matrices that share a row: the same place of the blocks, and nothing to tell them apart."""
    found: dict[object, list[int]] = {}
    for i, layer in enumerate(matrices):
        info = layer.info
        alike = (family_of(names[i], alone=names[i]), info.role, info.fan_in, info.fan_out, info.blocks, info.placement)
        found.setdefault((*alike, layer.note), []).append(i)
    return list(found.values())


def _label(group: Sequence[str], names: Sequence[str]) -> str:
    """Return what a row is called: ``h.*.mlp``, or ``net.{2,4}`` where others of the family have rows of their own."""
    if len(group) == 1:
        return group[0]
    of = family_of(group[0])
    if sum(family_of(name) == of for name in names) == len(group):
        return of
    return of.replace("*", f"{{{places_in(group)}}}", 1)


def _nodes(anatomy: Anatomy) -> list[str]:
    """Return the lines on modules of which features only are measured, and why those cannot be had, if they cannot."""
    names = [layer.info.name for layer in anatomy.nodes]
    if not names:
        return []
    notes = sorted({f": {layer.no_features}" for layer in anatomy.nodes if layer.no_features})
    return [printable(f"outputs of modules, features only ({len(names)}): {_listed(names)}"), *notes]


def _unmeasured(anatomy: Anatomy) -> list[str]:
    """Return the lines on parameters that have no row, by reason."""
    parts = [item for item in anatomy.unmeasured if item.reason.startswith(PART_OF)]
    left = [(item.name, item.reason) for item in anatomy.unmeasured if not item.reason.startswith(PART_OF)]
    made = _listed([item.name for item in parts])
    lines = [printable(f"parts of weights that are measured ({len(parts)}): {made}")] if parts else []
    return lines + unmeasured_lines(left, _listed)


def _listed(names: Sequence[str]) -> str:
    """Return names for a line, equal places of the blocks together."""
    return some(folded_names(names), MAX_NAMES)
