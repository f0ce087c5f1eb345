"""From the raw scalars of a measured step to a measurement."""

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

NOT_ARRIVED = "gradients were not seen right after the backward pass, or no optimizer made a step"
NO_TWO_STEPS = "needs two measured steps in a row, in a single process"


def measurement_of(
    step: int,
    layers: Sequence[Layer],
    requested: Settings,
    facts: StepContext,
    raw: Raw,
    reasons: dict[tuple[str, ...], dict[str, str]],
    skipped: int,
) -> Measurement:
    """Return every quantity of every layer, and the summary of the network.

    Args:
        reasons: of earlier measurements with the same quantities; mostly the same, so that measurements share them.
        skipped: the number of earlier updates that were skipped.
    """
    keys, network = requested.keys, raw.get(NETWORK, {})
    no_loss = facts.no_loss or facts.no_replay or (OTHER_LOSS if LOSS_CHANGE in network else NO_LOSS)
    loss_change, loss = network.pop(LOSS_CHANGE, [math.nan, math.nan])
    backward_loss = float(network.pop(LOSS, [math.nan])[0])
    changes = [[float(x) for x in value] for name, value in network.items() if name.startswith("g.changed")]
    reused = [float(network.pop(name)[0]) for name in list(network) if name.startswith(REUSED)]
    facts.rewritten, facts.clipped = any(change[0] for change in changes), any(change[1] for change in changes)
    rows, errors, missing = [], [], {}
    noise = settle_noise(raw, facts)
    for i, layer in enumerate(layers):
        readings = readings_of(i, layer, raw, facts)
        row, row_reasons = layer_row(i, layer, keys, readings, facts)
        rows.append(row)
        errors.append(layer_errors(row, readings, facts, requested.max_rows is None and not facts.sampled))
        missing.update({f"{key}/{layer.info.name}": reason for key, reason in row_reasons.items()})
    values, standard_errors = _columns(keys, rows), _columns(errors[0] if errors else (), errors)
    summary = summarize(values, layers, raw)

    def put(key: str, value: float, reason: str) -> None:
        """Put a value of the whole network, and the reason if it is NaN."""
        summary[key] = value
        if math.isnan(value) and reason:
            missing[f"{key}/{SUMMARY}"] = reason

    for key, (value, reason) in noise.items():
        put(key, value, reason)
    if "feature_change" in values:
        summary["feature_error"] = max(relative_errors(values, standard_errors, "feature_change"), default=math.nan)
    if "contribution" in values:
        put("stale_gradient", _any_reused(reused), NO_TWO_STEPS)
        summary.update(facts.modes)
        put("clip_factor", _clip_factor(changes), CLIPPED if facts.clipped else NOT_ARRIVED)
        fault = facts.loss_fault
        put("unfit_loss_input", math.nan if fault is None else float(fault), NO_LOSS)
    if facts.rewritten or facts.clipped or facts.closures > 1:
        summary["loss_change_predicted"] = math.nan
    if "dh" in requested.needs or facts.no_loss is not None:
        put("loss", backward_loss if math.isnan(loss) else float(loss), no_loss)
        put("loss_change", float(loss_change), no_loss)
        if {"feature_rms", "backward_stable_rank"} <= values.keys():
            put("loss_distance", *loss_distance(backward_loss, layers, raw, facts))
        if "loss_change_predicted" in summary:
            edge_values, edge_reasons = edge(summary, float(loss), no_loss, len(changes), facts)
            for key, value in edge_values.items():
                put(key, value, edge_reasons.get(key, ""))
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
    return Measurement(step, infos, values, summary, reasons=reasons[keys], errors=standard_errors)


def _clip_factor(changes: Sequence[Sequence[float]]) -> float:
    """Return the size of gradients after clipping over that before, for the optimizer with the strongest clipping."""
    # Sums over processes: the factor, and the number of processes that know it.
    factors = [count / factor for _, uneven, factor, count in changes if count and not uneven]
    return min(factors) if len(factors) == len(changes) > 0 else math.nan


def _columns(keys: Iterable[str], rows: Sequence[Mapping[str, float]]) -> dict[str, Tensor]:
    """Return key -> (L,), the values of all layers."""
    return {key: torch.tensor([row[key] for row in rows], dtype=torch.float32, device="cpu") for key in keys}


def relative_errors(values: Mapping[str, Tensor], errors: Mapping[str, Tensor], key: str) -> list[float]:
    """Return the standard errors of a quantity relative to its values, of the layers that have both."""
    if key not in errors:
        return []
    pairs = zip(errors[key].tolist(), values[key].tolist(), strict=True)
    return [error / value for error, value in pairs if value > 0 and not math.isnan(error)]


def known_errors(errors: Mapping[str, Tensor], key: str) -> list[float]:
    """Return the standard errors of a quantity that are not NaN."""
    return [error for error in errors[key].tolist() if not math.isnan(error)] if key in errors else []


def _any_reused(reused: Sequence[float]) -> float:
    """Return 1 if an optimizer used gradients again, 0 if none did, NaN if that is not known of all."""
    if 1.0 in reused:
        return 1.0
    return math.nan if not reused or any(map(math.isnan, reused)) else 0.0
