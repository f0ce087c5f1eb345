"""The moments that an optimizer like Adam holds of each layer, after its step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from spectral_monitor.engine.results.raw import RawScalars
from spectral_monitor.engine.results.reasons import StepContext
from spectral_monitor.engine.weights.gradients import gradient_here
from spectral_monitor.engine.weights.matrix_batches import BatchMember
from spectral_monitor.functional.adam import adam_sums, dead_row_share
from spectral_monitor.linalg import Coroutine
from spectral_monitor.sharding.shard_region import extent_of
from spectral_monitor.state.dtensor import local_part

NO_MOMENTS = "its optimizer keeps no exp_avg and exp_avg_sq of it"
COMPUTED = "its weight is computed from other parameters"
ELSEWHERE = "what its optimizer holds has another shape than the parameter"


def _moments(optimizer: Optimizer, group: Mapping[str, Any], p: Tensor) -> tuple[Tensor, Tensor, Tensor, float] | str:
    """Return what :func:`~spectral_monitor.functional.adam.adam_sums` takes of the part of a parameter that is here, or
    why there is none; where the optimizer uses the largest second moment so far, that.
    """
    state = optimizer.state.get(p, {})
    first, second = state.get("exp_avg"), state.get("max_exp_avg_sq", state.get("exp_avg_sq"))
    gradient = gradient_here(p)
    if not isinstance(first, Tensor) or not isinstance(second, Tensor) or gradient is None:
        return NO_MOMENTS
    first, second = local_part(first), local_part(second)
    if not first.shape == second.shape == gradient.shape:
        return ELSEWHERE
    betas, step = group.get("betas", (0.0, 0.0)), state.get("step", group.get("step"))
    # 1 - beta2^t, without asking for a count that may lie on the device, and to all digits in float32.
    rate = math.log(float(betas[1])) if float(betas[1]) > 0 else -math.inf
    place = step.device if isinstance(step, Tensor) else "cpu"
    count = None if step is None else torch.as_tensor(step, dtype=torch.float32, device=place)
    corrected = second if count is None else second / -torch.expm1(rate * count)
    return gradient, first, corrected, float(group.get("eps", 0.0))


def adam_state(
    optimizer: Optimizer,
    members: Mapping[int, BatchMember],
    copies: Callable[[Tensor], int],
    facts: StepContext,
    out: RawScalars,
) -> Coroutine[None]:
    """Put sums over the moments of some layers, and the shares of their dead rows.

    Args:
        optimizer: that has just stepped.
        members: layer index -> those it holds.
        copies: in how many processes the same part of a parameter is.
        facts: of the step; are told why there are none.
        out: for the numbers.
    """
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    layers = sorted(i for i in members if members[i].layer.info.role != "vector")
    device = next((local_part(p).device for i in layers for p in members[i].layer.sources), torch.device("cpu"))
    table = torch.zeros(len(layers), 6, dtype=torch.float64, device=device)
    rows: list[Tensor] = []
    for k, i in enumerate(layers):
        layer = members[i].layer
        p, shape = layer.sources[0], layer.layout.shape
        across = 1 if layer.layout.kind in ("transposed", "conv_transposed") else 0  # the dimension of the outputs
        rows.append(torch.zeros(shape[across], dtype=torch.float64, device=device))
        found = COMPUTED if layer.compute is not None else _moments(optimizer, groups.get(id(p), {}), p)
        if isinstance(found, str):
            facts.why_not["state", i] = found
            continue
        table[k] = adam_sums(*found).to(device) / copies(p)
        box = extent_of(p).box[-len(shape) :]
        if tuple(p.shape)[-len(shape) :] == shape:  # FSDP1 leaves a piece of a flat one
            _, _, second, _ = found
            here = second.reshape([stop - start for start, stop in box])
            sums = here.double().transpose(0, across).flatten(1).sum(1)
            rows[k][slice(*box[across])] = sums.to(device) / copies(p)
    table, *rows = yield [table, *rows]
    for i, sums, of_rows in zip(layers, table, rows, strict=True):
        if ("state", i) not in facts.why_not:
            for name, value in zip(("n", "ratio", "eps", "mg", "mm", "gg"), sums, strict=True):
                out.put(i, f"adam.{name}", value)
            out.put(i, "dead_rows", dead_row_share(of_rows))
