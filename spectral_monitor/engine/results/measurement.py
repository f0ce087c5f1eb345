"""From the numbers of a measured step to a measurement."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from spectral_monitor.engine.results.loss import NO_LOSS, OTHER_LOSS, edge, loss_distance
from spectral_monitor.engine.results.noise import settle_noise
from spectral_monitor.engine.results.raw import LOSS, LOSS_CHANGE, NETWORK, REUSED, Raw
from spectral_monitor.engine.results.reasons import CLIPPED, StepContext, layer_errors, layer_row, readings_of
from spectral_monitor.engine.results.summary import equilibrium_steps, other_reasons, properties, summarize
from spectral_monitor.engine.settings import Settings
from spectral_monitor.layers import Layer
from spectral_monitor.measurement import SUMMARY, Measurement
from spectral_monitor.quantities import TIERS
from spectral_monitor.quantities.readings import sound

NOT_ARRIVED = "gradients were not seen as the backward pass left them, or no optimizer made a step"
NO_TWO_STEPS = "it takes two steps in a row that are measured, of one process"


def measurement_of(
    step: int,
    layers: Sequence[Layer],
    asked: Settings,
    facts: StepContext,
    raw: Raw,
    reasons: dict[tuple[str, ...], dict[str, str]],
    skipped: int,
) -> Measurement:
    """Return every quantity of every layer, and the summary of the network.

    Args:
        step: that was measured.
        layers: rows of the measurement.
        asked: its settings.
        facts: what the host knows of it.
        raw: the numbers.
        reasons: of earlier measurements with the same quantities: mostly the same, so one copy serves them all.
        skipped: updates before this one that were.
    """
    keys, network = asked.keys, raw.get(NETWORK, {})
    no_loss = facts.no_loss or facts.no_replay or (OTHER_LOSS if LOSS_CHANGE in network else NO_LOSS)
    change, loss = network.pop(LOSS_CHANGE, [math.nan, math.nan])
    begun = float(network.pop(LOSS, [math.nan])[0])
    changed = [[float(x) for x in value] for name, value in network.items() if name.startswith("g.changed")]
    reused = [float(network.pop(name)[0]) for name in list(network) if name.startswith(REUSED)]
    facts.rewritten, facts.clipped = any(some[0] for some in changed), any(some[1] for some in changed)
    rows, errors, missing = [], [], {}
    noise = settle_noise(raw, facts)
    for i, layer in enumerate(layers):
        readings = readings_of(i, layer, raw, facts)
        row, why = layer_row(i, layer, keys, readings, facts)
        rows.append(row)
        errors.append(layer_errors(row, readings, facts, asked.max_rows is None and not facts.sampled))
        missing.update({f"{key}/{layer.info.name}": reason for key, reason in why.items()})
    values, off = _columns(keys, rows), _columns(errors[0] if errors else (), errors)
    summary = summarize(values, layers, raw)

    def tell(key: str, value: float, why: str) -> None:
        """Put a value of the whole network, and the reason if it is missing."""
        summary[key] = value
        if math.isnan(value) and why:
            missing[f"{key}/{SUMMARY}"] = why

    for key, (value, reason) in noise.items():
        tell(key, value, reason)
    if "feature_change" in values:
        summary["feature_error"] = max(relative_errors(values, off, "feature_change"), default=math.nan)
    if "contribution" in values:
        tell("stale_gradient", _of_all(reused), NO_TWO_STEPS)
        summary.update(facts.modes)
        tell("clip_factor", _clip_factor(changed), CLIPPED if facts.clipped else NOT_ARRIVED)
        unfit = facts.unfit_loss_input
        tell("unfit_loss_input", math.nan if unfit is None else float(unfit), NO_LOSS)
    if facts.rewritten or facts.clipped or facts.closures > 1:
        summary["loss_change_predicted"] = math.nan
    if "dh" in asked.needs or facts.no_loss is not None:
        tell("loss", begun if math.isnan(loss) else float(loss), no_loss)
        tell("loss_change", float(change), no_loss)
        if {"feature_rms", "backward_stable_rank"} <= values.keys():
            tell("loss_distance", *loss_distance(begun, layers, raw, facts))
        if "loss_change_predicted" in summary:
            found, unknown = edge(summary, float(loss), no_loss, len(changed), facts)
            for key, value in found.items():
                tell(key, value, unknown.get(key, ""))
    if "equilibrium" in values:
        summary["equilibrium_steps"] = equilibrium_steps(layers, facts)
    skipped += not (facts.stepped - facts.unused) or not all(map(sound, raw.values()))
    summary["skipped_updates"] = float(skipped)
    if set(values) >= set(TIERS["full"]):
        summary.update(properties(values, summary, layers, raw, facts.eps))
    missing.update(other_reasons(summary, layers, missing))
    if missing != reasons.get(keys):
        reasons[keys] = missing
    infos = tuple(layer.info for layer in layers)
    return Measurement(step, infos, values, summary, reasons=reasons[keys], errors=off)


def _clip_factor(changed: Sequence[Sequence[float]]) -> float:
    """Return the size of gradients after clipping over that before, of the optimizer whose were clipped most."""
    factors = [known / factor for _, uneven, factor, known in changed if known and not uneven]
    return min(factors) if len(factors) == len(changed) > 0 else math.nan


def _columns(keys: Iterable[str], rows: Sequence[Mapping[str, float]]) -> dict[str, Tensor]:
    """Return key -> (L,) the numbers of all layers."""
    return {key: torch.tensor([row[key] for row in rows], dtype=torch.float32, device="cpu") for key in keys}


def relative_errors(values: Mapping[str, Tensor], errors: Mapping[str, Tensor], key: str) -> list[float]:
    """Return the standard errors of a quantity, relative to it, of the layers that have one."""
    if key not in errors:
        return []
    pairs = zip(errors[key].tolist(), values[key].tolist(), strict=True)
    return [error / value for error, value in pairs if value > 0 and not math.isnan(error)]


def known_errors(errors: Mapping[str, Tensor], key: str) -> list[float]:
    """Return the standard errors of a quantity of the layers that have one."""
    return [error for error in errors[key].tolist() if not math.isnan(error)] if key in errors else []


def _of_all(reused: Sequence[float]) -> float:
    """Return 1 if an optimizer used gradients again, 0 if none did, NaN where some do not tell."""
    if 1.0 in reused:
        return 1.0
    return math.nan if not reused or any(map(math.isnan, reused)) else 0.0
