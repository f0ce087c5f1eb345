"""What is measured of every model of the zoo, as a table for the documentation."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterable

from spectral_monitor import SpectralProbe
from spectral_monitor.layers import Anatomy, Layer
from spectral_monitor.layers.output_layers import BY_PLACE
from spectral_monitor.messages import SpectralMonitorWarning
from tests.zoo.case import Case

HEAD = """| architecture | matrices | biases, gains | features of | readout | not measured |
|---|---|---|---|---|---|
"""


def table(cases: Iterable[Case]) -> str:
    """Markdown, families under headings of their own."""
    lines, family = "", ""
    for case in cases:
        if case.family != family:
            family = case.family
            lines += f"\n### {family[0].upper()}{family[1:]}\n\n{HEAD}"
        lines += f"| {' | '.join(row(case))} |\n"
    return lines


def row(case: Case) -> tuple[str, ...]:
    """What five measured steps show: some models leave layers out by chance."""
    model = case.make()
    optimizers = case.optimizers(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SpectralMonitorWarning)
        probe = SpectralProbe(model, optimizers, every_n_steps=1)
        for batch in case.batches(5):
            with probe.step():
                case.step(case, model, optimizers, batch)
    anatomy = probe.anatomy
    matrices = [layer for layer in anatomy.layers if layer.is_matrix]
    return (
        case.name,
        str(len(matrices)),
        str(len(anatomy.layers) - len(matrices)),
        str(sum(seen(probe, layer) for layer in matrices)),
        readout(matrices),
        unmeasured(anatomy),
    )


def seen(probe: SpectralProbe, layer: Layer) -> bool:
    return any(not math.isnan(m.value("feature_rms", layer.info.name)) for m in probe.measurements)


def readout(matrices: list[Layer]) -> str:
    found = [layer for layer in matrices if layer.info.role == "readout"]
    told = [f"`{layer.info.name}`" + (", tied" if layer.tied_to else "") for layer in found]
    return "; ".join(told) + (", by its place" if any(BY_PLACE in layer.note for layer in found) else "")


def unmeasured(anatomy: Anatomy) -> str:
    """Reasons up to the colon, each with how many parameters it concerns; parts of a measured weight are no gap."""
    reasons = Counter(
        item.reason.partition(":")[0] for item in anatomy.unmeasured if not item.reason.startswith("part of the weight")
    )
    return "; ".join(f"{count}: {reason}" for reason, count in reasons.items()) or "-"
