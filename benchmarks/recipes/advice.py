"""Follow what a verdict advises: change a fresh faulty run as a user would who believes every word."""

from __future__ import annotations

import math

from benchmarks.recipes.recipe import Fault
from benchmarks.recipes.run import Run
from spectral_monitor.condition import Verdict


def follow(verdict: Verdict, fault: Fault, run: Run) -> bool:
    """Change a run as a verdict advises; return whether there was anything to follow.

    Advice to look at something that no setting mends, such as the scale of the inputs, is followed by mending the
    fault if the verdict names it, for then a user finds it there; with a wrong cause there is nothing to find.
    """
    remedy = verdict.remedy
    if remedy is None:
        return False
    if remedy.action == "check":
        if verdict.cause in fault.causes and fault.mend is not None:
            fault.mend(run)
            return True
        return False
    if remedy.action == "set_lr":
        for layer in remedy.layers:
            run.set_rate(layer, remedy.value)
    elif remedy.action == "scale_lr" and not remedy.layers:
        run.scale_rates(remedy.value)
        for layer in remedy.spared:
            run.scale_rate(f"{layer}*", 1 / remedy.value)
    elif remedy.action == "scale_lr":
        for layer in remedy.layers:
            run.scale_rate(f"{layer}*", remedy.value)
    elif remedy.action == "scale_weights":
        names = [name for name, p in run.model.named_parameters() if p.ndim > 1]
        for layer in remedy.layers or names:
            for name in names:
                if name == layer or name.startswith(f"{layer}."):
                    run.scale_weight(name, remedy.value)
    elif remedy.action == "set_eps":
        run.set_option(eps=remedy.value)
    elif remedy.action == "set_weight_decay":
        named = [p for layer in remedy.layers for _, p in run.parameters(f"{layer}*")]
        for group in run.groups():
            if any(p is q for p in group["params"] for q in named):
                group["weight_decay"] = remedy.value
    elif remedy.action == "set_momentum":
        for group in run.groups():
            if "momentum" in group:
                group["momentum"] = remedy.value
            elif "betas" in group:
                group["betas"] = (remedy.value, *group["betas"][1:])
    else:
        raise ValueError(f"advice {remedy.action!r} cannot be followed")
    return True


def change(before: float, after: float) -> float:
    """Return the change of a loss, relative to what it was; -inf from divergence to a number."""
    if math.isinf(before):
        return 0.0 if math.isinf(after) else -math.inf
    return (after - before) / abs(before) if before else after
