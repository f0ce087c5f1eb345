"""Whether two processes' measurements are those of one: every quantity, with the tolerance its arithmetic allows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, linalg

Plain = Mapping[str, Any]
"""A measurement as :func:`distributed.fitting.plain` gives it."""

CHANGES = frozenset(
    {"feature_change", "bfa", "bfa_cos", "sensitivity", "feature_drift", "feature_change_local", "loss_change"}
)
"""Made of differences of two nearly equal numbers: what was rounded in them counts for more."""
ALONE = "stale_gradient"
"""Known of one process alone: sharded gradients lie in other places while the backward pass runs."""
LIKE_ALONE = ("name", "role", "fan_out", "fan_in", "shape", "blocks")


def tolerance(key: str, expected: float, row: Mapping[str, float]) -> float:
    """How far from ``expected`` a value may be; ``row`` has the other values of the layer, or of the summary.

    Relative, but for what is small only since larger things cancel: a cosine is uncertain by the rounding of vectors
    of length 1, and a sensitivity, one over a cosine, by that much relative to it. A loss is rounded before its change
    is taken; a drift of 0 is made of features of size 1. The smallest contribution, by which a spread is divided, is a
    sum whose terms cancel.
    """
    relative = 1e-3 if key in CHANGES else 1e-4
    if key == "sensitivity":
        cosine = abs(row.get("bfa_cos", 1.0))
        return abs(expected) * (relative + (0.0 if math.isnan(cosine) else 1e-4 / max(cosine, 1e-12)))
    if key in ("edge", "critical_lr"):  # known to two digits
        return abs(expected) * 2e-2
    if key == "contribution_spread":
        return abs(expected) * 1e-3
    if key == "bfa":  # an angle near 0 is the root of what is rounded in its cosine
        return abs(expected) * relative + 1e-4 + min(5e-4, 1e-6 / max(math.sin(abs(expected)), 1e-9))
    floor = {"bfa_cos": 1e-4, "loss_change": 1e-6, "feature_drift": 1e-6}.get(key, 1e-9)
    return abs(expected) * relative + floor


def differences(expected: Sequence[Plain], found: Sequence[Plain]) -> list[str]:
    """One sentence for everything that is not the same."""
    if [m["step"] for m in expected] != [m["step"] for m in found]:
        return [f"steps {[m['step'] for m in found]}, not {[m['step'] for m in expected]}"]
    return [text for one, other in zip(expected, found, strict=True) for text in _differences(one, other)]


def _differences(expected: Plain, found: Plain) -> Iterator[str]:
    names = [layer["name"] for layer in expected["layers"]]
    if [layer["name"] for layer in found["layers"]] != names:
        yield f"layers {[layer['name'] for layer in found['layers']]}, not {names}"
        return
    for one, other in zip(expected["layers"], found["layers"], strict=True):
        for key in LIKE_ALONE:
            if one[key] != other[key]:
                yield f"{one['name']}: {key} is {other[key]}, not {one[key]}"
    step = expected["step"]
    if list(expected["values"]) != list(found["values"]):
        yield f"step {step}: quantities {list(found['values'])}"
        return
    for i, name in enumerate(names):
        row = {key: column[i] for key, column in expected["values"].items()}
        for key, value in row.items():
            where, mine = f"{key}/{name}", found["values"][key][i]
            if not near(mine, value, tolerance(key, value, row)):
                because = found["why"].get(where, "")
                yield f"step {step}: {where} is {mine:.7g}, not {value:.7g} {because and f'({because})'}"
            elif bool(expected["why"].get(where)) != bool(found["why"].get(where)):
                yield f"step {step}: why {where} is missing: {found['why'].get(where)!r}"
    told, mine = ([(v["layer"], v["cause"], v["root"]) for v in m["verdicts"]] for m in (expected, found))
    if mine != told:
        yield f"step {step}: verdicts {mine}, not {told}"
    if found["states"] != expected["states"]:
        yield f"step {step}: states {found['states']}, not {expected['states']}"
    for key in sorted({**expected["summary"], **found["summary"]}.keys() - {ALONE}):
        value, mine = expected["summary"].get(key, math.inf), found["summary"].get(key, math.inf)
        if not near(mine, value, tolerance(key, value, expected["summary"])):
            yield f"step {step}: summary/{key} is {mine:.7g}, not {value:.7g}"


def near(found: float, expected: float, allowed: float) -> bool:
    """Whether they are that near, or both NaN."""
    if math.isnan(expected) or math.isnan(found):
        return math.isnan(expected) and math.isnan(found)
    return found == expected or abs(found - expected) <= allowed


def of_weights(weights: Sequence[Mapping[str, Tensor]], index: int, name: str) -> dict[str, float]:
    """What there is to say of a layer's weights at a step, by a full decomposition in double precision."""
    start, before, after = (weights[k][f"{name}.weight"].double() for k in (0, index, index + 1))
    update, drift = after - before, after - start
    norm = {key: float(linalg.matrix_norm(m, 2)) for key, m in (("W", before), ("dW", update), ("drift", drift))}
    fro = {key: float(linalg.matrix_norm(m)) for key, m in (("W", before), ("dW", update))}
    return {
        "weight_norm": norm["W"],
        "weight_natural": norm["W"] * math.sqrt(before.shape[1] / before.shape[0]),
        "weight_fro": fro["W"],
        "weight_stable_rank": (fro["W"] / norm["W"]) ** 2,
        "update_norm": norm["dW"],
        "update_ratio": norm["dW"] / norm["W"],
        "update_fro": fro["dW"],
        "drift_ratio": norm["drift"] / float(linalg.matrix_norm(start, 2)),
        "drift_fro_ratio": float(linalg.matrix_norm(drift) / linalg.matrix_norm(start)),
    }
