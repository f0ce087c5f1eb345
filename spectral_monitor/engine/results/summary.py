"""The properties that "The Feature Speed Formula" asks of a scaling, as values of the whole network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from spectral_monitor.engine.results.raw import Raw
from spectral_monitor.engine.results.reasons import CHANGE_MARGIN, StepContext
from spectral_monitor.functional.medians import geometric_median
from spectral_monitor.layers import Layer
from spectral_monitor.measurement import NODE


def properties(
    values: Mapping[str, Tensor],
    summary: Mapping[str, float],
    layers: Sequence[Layer],
    raw: Raw,
    eps: Mapping[int, float],
) -> dict[str, float]:
    """Name -> value, NaN where it is not known.

    The last features are the readout's inputs. (SP), (FS) and (BS) go by the outputs of the layers: of those that are
    known, the one furthest off. (FS) is of features alone. The paper takes it over l < L, since the outputs of the
    network begin near 0 where they are small by design, and their relative change has no bound.

    Args:
        values: quantities of each layer, tier "full".
        summary: values of the whole network that there are already.
        layers: those of the values.
        raw: what they were read off.
        eps: layer index -> rounding of its outputs.
    """
    hidden = [i for i, layer in enumerate(layers) if layer.info.role == "operator"]
    readouts = [i for i, layer in enumerate(layers) if layer.info.role == "readout"]
    own = [i for i, layer in enumerate(layers) if layer.info.role != NODE]
    features = [i for i in own if i not in readouts]
    sizes = [size for i in hidden if math.isfinite(size := float(values["feature_rms"][i]))]
    found = {
        "property_sp": max(sizes, key=lambda size: abs(math.log(size)) if size > 0 else math.inf, default=math.nan),
        "property_fl": math.nan,
        "property_ld": -summary["loss_change_predicted"],
        "property_bc": summary["contribution_spread"],
        "property_rfl": math.nan,
        "property_fs": _largest(values["feature_change"][features]),
        "property_bs": _largest(values["backward_speed"][own]),
    }
    if len(readouts) == 1:
        seen = raw.get(readouts[0], {})
        if "dx.norm" in seen:
            (change,), (size,), (before,) = seen["dx.norm"], seen["dx.size"], seen["x.norm"]
            if change == 0 or change >= CHANGE_MARGIN * eps[readouts[0]] * before:
                found["property_fl"] = change / math.sqrt(size)
                found["property_rfl"] = change / before if before else math.nan
    return found


def equilibrium_steps(layers: Sequence[Layer], facts: StepContext) -> float:
    """Return in how many steps decay makes hidden weights forget their size: the median of 1 / (2 lr wd)."""
    rates = [facts.lr[i] * facts.decay[i].factor for i in facts.decay if layers[i].info.role == "operator"]
    middle = geometric_median(rate for rate in rates if rate > 0)
    return 1 / (2 * middle) if middle > 0 else math.nan


def _largest(values: Tensor) -> float:
    return max((value for value in values.tolist() if math.isfinite(value)), default=math.nan)
