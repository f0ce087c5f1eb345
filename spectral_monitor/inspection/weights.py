"""The weights of a model or a checkpoint as they are: sizes, stable ranks and roles, without training."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spectral_monitor.capture.unwrap import unwrap_model
from spectral_monitor.inspection.checkpoint import skeleton, weights_in
from spectral_monitor.layers.inspect_model import Layer, dissect
from spectral_monitor.linalg import spectral_estimate
from spectral_monitor.measurement import LayerInfo, Measurement
from spectral_monitor.parametrization.init import largest_row, refuse_spread
from spectral_monitor.quantities import QUANTITIES, Readings
from spectral_monitor.reporting.text.lines import Column, Table
from spectral_monitor.reporting.text.notebook import html_table
from spectral_monitor.reporting.text.roles import Roles
from spectral_monitor.reporting.text.table import number

MEASURED_KEYS = ("weight_norm", "weight_natural", "weight_fro", "weight_stable_rank")


class Inspection:
    """The result of :func:`inspect`; it prints as a table.

    Attributes:
        roles: every layer with its role, and the reason for each part that is not measured.
        measurement: the numbers, as a measurement at step 0: ``weight_norm``, ``weight_natural``, ``weight_fro`` and
            ``weight_stable_rank``.
    """

    def __init__(self, roles: Roles, measurement: Measurement) -> None:
        self.roles, self.measurement = roles, measurement

    def __getitem__(self, layer: str) -> dict[str, float]:
        """Return all numbers of a layer.

        Raises:
            KeyError: there is no such layer; the error suggests a similar name.
        """
        return self.measurement[layer]

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one plain dict for each layer."""
        return self.measurement.to_rows()

    def to_pandas(self) -> Any:
        """Return a ``pandas.DataFrame`` in long format, as of a measurement.

        Raises:
            ImportError: pandas is not installed.
        """
        return self.measurement.to_pandas()

    def table(self) -> str:
        """Return a row for each matrix as text."""
        return str(self.rows())

    def rows(self, layers: Collection[str] | None = None) -> Table:
        """Return a row for each matrix, of some layers or of all."""
        m, role_table = self.measurement, self.roles.table()
        matrices = [i for i, info in enumerate(m.layers) if info.is_matrix]
        titles = {"largest sv": "weight_norm", "|W|": "weight_natural", "srank W": "weight_stable_rank"}
        numbers = [Column(title, tuple(map(number, m.values[key][matrices].tolist()))) for title, key in titles.items()]
        numbers.append(Column("of", tuple(str(_full_rank(m.layers[i])) for i in matrices)))
        columns = [*role_table.columns[:3], *numbers, *role_table.columns[3:]]
        rows = [k for k, i in enumerate(matrices) if layers is None or m.layers[i].name in layers]
        columns = [replace(column, cells=tuple(column.cells[k] for k in rows)) for column in columns]
        foot = (
            "largest sv: largest singular value; |W|: largest RMS out for RMS 1 in, of order 1 at any width",
            "srank W: number of directions that the weight stretches by similar amounts, of all",
            *role_table.foot,
        )
        return replace(role_table, columns=tuple(columns) if matrices else (), foot=foot)

    def __repr__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return html_table(self.rows())


def inspect(
    model: nn.Module | Mapping[str, Tensor] | str | os.PathLike[str], *, roles: Mapping[str, str] | None = None
) -> Inspection:
    """Measure the weights of a model or a checkpoint, without training and without changing anything.

    Args:
        model: a module; or a ``state_dict``; or the path of a Lightning checkpoint, of a ``state_dict`` that
            ``torch.save`` has written, or of a ``.safetensors`` file. Without a module, roles are guessed from names
            and shapes; a matrix is (out, in), unless a bias shows that its inputs come first.
        roles: pattern -> role, where a guess is wrong.

    Raises:
        TypeError: the model is something else.
        ValueError: nothing in it can be measured, a pattern matches nothing, or the file holds more than tensors.
        OSError: the file cannot be read.
        ImportError: safetensors is not installed.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> _ = nn.init.eye_(model[0].weight)
        >>> inspection = inspect(model)
        >>> inspection["0"]["weight_natural"], inspection["0"]["weight_stable_rank"], inspection.roles["2"]
        (1.0, 4.0, 'readout')
    """
    if isinstance(model, nn.Module):
        root = unwrap_model(model)
    elif isinstance(model, Mapping):
        root = skeleton(model, "the state_dict")
    elif isinstance(model, str | os.PathLike):
        root = skeleton(weights_in(Path(model)), repr(str(model)))
    else:
        raise TypeError(f"inspect takes a module, a state_dict or the path of a checkpoint, got {type(model).__name__}")
    anatomy = dissect(root, roles=roles)
    refuse_spread(anatomy.layers, ": inspect the model before it is sharded, or a checkpoint")
    rows = [_measured(layer) for layer in anatomy.layers]
    values = {key: torch.tensor([row[key] for row in rows]) for key in MEASURED_KEYS}
    return Inspection(Roles.of(anatomy), Measurement(0, anatomy.infos, values, {}))


def _full_rank(info: LayerInfo) -> int:
    """Return the largest stable rank that a layer can have."""
    return min(info.shape[-2:]) if info.role == "embedding" else min(info.fan_in, info.fan_out)


@torch.no_grad()
def _measured(layer: Layer) -> dict[str, float]:
    """Return the numbers of a layer, by the formulas of a measured step."""
    weight = layer.weight()
    if weight.is_meta:
        return dict.fromkeys(MEASURED_KEYS, math.nan)
    stack = layer.layout.stack(weight).flatten(0, 1)  # (taps * blocks, fan_out, fan_in)
    estimate = spectral_estimate(stack)
    raw = {"W.sigma": estimate.sigma, "W.fro": estimate.fro}
    if layer.info.role == "embedding":
        raw["W.row"] = torch.tensor([largest_row(layer, weight)])
    readings = Readings(raw, layer.info.role, layer.layout.fan_in, layer.layout.fan_outs)
    return {key: QUANTITIES[key].value(readings) for key in MEASURED_KEYS}
