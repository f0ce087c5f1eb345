"""The layers and their roles, as a dict that prints as a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from spectral_monitor.suggestions import unknown

if TYPE_CHECKING:
    from spectral_monitor.layers import Anatomy
    from spectral_monitor.measurement import LayerInfo
    from spectral_monitor.reporting.text.lines import Table


class Roles(dict[str, str]):
    """Layer -> role, for every measured layer; it prints as a table and can be passed as ``roles=``.

    Attributes:
        notes: layer -> note, such as why it counts as the readout.
        unmeasured: parameter -> why it is not measured.

    Example:
        >>> from spectral_monitor import LayerInfo
        >>> body = LayerInfo("body", "operator", 64, 64, (64, 64))
        >>> roles = Roles([body, LayerInfo("head", "readout", 9, 64, (9, 64))])
        >>> roles["head"]
        'readout'
        >>> roles
        2 matrices and 0 biases and gains
        layer  role    in -> out
        body   hidden  64 -> 64
        head   output  64 -> 9
    """

    def __init__(
        self,
        layers: Iterable[LayerInfo],
        notes: Mapping[str, str] | None = None,
        unmeasured: Mapping[str, str] | None = None,
        no_features: Mapping[str, str] | None = None,
    ) -> None:
        self.layers = tuple(layers)
        super().__init__({info.name: info.role for info in self.layers})
        self.notes = {name: note for name, note in (notes or {}).items() if note}
        self.unmeasured, self.no_features = dict(unmeasured or {}), dict(no_features or {})

    @classmethod
    def of(cls, anatomy: Anatomy) -> Roles:
        """Return the roles in a model."""
        notes = {layer.info.name: layer.note for layer in anatomy.layers}
        no_features = {layer.info.name: layer.no_features for layer in anatomy.layers if layer.no_features}
        return cls(anatomy.infos, notes, {item.name: item.reason for item in anatomy.unmeasured}, no_features)

    def __missing__(self, layer: str) -> str:
        if layer in self.unmeasured:
            raise KeyError(f"{layer!r} is not measured: {self.unmeasured[layer]}")
        raise KeyError(unknown("layer", layer, self))

    def table(self) -> Table:
        """Return a table with a row for every matrix; below it, what is not measured, and why."""
        from spectral_monitor.reporting.content.labels import measured_parts, role_name
        from spectral_monitor.reporting.text.lines import NO_FEATURES, NOT_MEASURED, Table, reason_lines, text_column
        from spectral_monitor.reporting.text.table import fans

        matrices = [info for info in self.layers if info.is_matrix]
        title = measured_parts(len(matrices), len(self.layers) - len(matrices))
        columns = []
        if matrices:
            columns = [
                text_column("layer", [info.name for info in matrices]),
                text_column("role", [role_name(info.role) for info in matrices]),
                text_column("in -> out", [fans(info) for info in matrices]),
            ]
        notes = [self.notes.get(info.name, "") for info in matrices]
        if any(notes):
            columns.append(text_column("note", notes))
        featureless = [(name, self.no_features[name]) for info in matrices if (name := info.name) in self.no_features]
        foot = reason_lines(NO_FEATURES, featureless, ", ".join)
        return Table(title, tuple(columns), (*foot, *reason_lines(NOT_MEASURED, [*self.unmeasured.items()], ", ".join)))

    def __repr__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        from spectral_monitor.reporting.text.notebook import html_table

        return html_table(self.table())

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.layers, self.notes, self.unmeasured, self.no_features)
