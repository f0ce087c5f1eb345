"""The moments that an optimizer like Adam keeps of each layer, after its step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from spectral_monitor.engine.results.raw import RawScalars
from spectral_monitor.engine.results.reasons import StepContext
from spectral_monitor.engine.weights.gradients import local_gradient
from spectral_monitor.engine.weights.matrix_batches import BatchMember
from spectral_monitor.functional.adam import adam_sums, dead_row_share
from spectral_monitor.linalg import Coroutine
from spectral_monitor.sharding.shard_region import extent_of
from spectral_monitor.state.dtensor import local_part

NO_MOMENTS = "its optimizer keeps no exp_avg and exp_avg_sq for it"
COMPUTED = "its weight is computed from other parameters"
ELSEWHERE = "the optimizer's state has another shape than the parameter"


def _moments(optimizer: Optimizer, group: Mapping[str, Any], p: Tensor) -> tuple[Tensor, Tensor, Tensor, float] | str:
    """Return the arguments of :func:`~spectral_monitor.functional.adam.adam_sums` for the local part of a parameter.

    The second moment is the largest one so far if the optimizer uses that. A text says why there are no moments.
    """
    state = optimizer.state.get(p, {})
    first, second = state.get("exp_avg"), state.get("max_exp_avg_sq", state.get("exp_avg_sq"))
    gradient = local_gradient(p)
    if not isinstance(first, Tensor) or not isinstance(second, Tensor) or gradient is None:
        return NO_MOMENTS
    first, second = local_part(first), local_part(second)
    if not first.shape == second.shape == gradient.shape:
        return ELSEWHERE
    betas, step = group.get("betas", (0.0, 0.0)), state.get("step", group.get("step"))
    # 1 - beta2^t, accurate in float32, and without a copy of the count, which may be on the device.
    rate = math.log(float(betas[1])) if float(betas[1]) > 0 else -math.inf
    device = step.device if isinstance(step, Tensor) else "cpu"
    count = None if step is None else torch.as_tensor(step, dtype=torch.float32, device=device)
    corrected = second if count is None else second / -torch.expm1(rate * count)
    return gradient, first, corrected, float(group.get("eps", 0.0))


def adam_state(
    optimizer: Optimizer,
    members: Mapping[int, BatchMember],
    copies: Callable[[Tensor], int],
    facts: StepContext,
    out: RawScalars,
) -> Coroutine[None]:
    """Put sums over the moments of layers, and the shares of their dead rows.

    Args:
        optimizer: it has just stepped.
        members: layer index -> layers that it trains.
        copies: the number of processes that hold the same part of a parameter.
        facts: of the step; they receive the reasons for missing moments.
    """
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    layers = sorted(i for i in members if members[i].layer.info.role != "vector")
    device = next((local_part(p).device for i in layers for p in members[i].layer.sources), torch.device("cpu"))
    table = torch.zeros(len(layers), 6, dtype=torch.float64, device=device)
    rows: list[Tensor] = []
    for k, i in enumerate(layers):
        layer = members[i].layer
        p, shape = layer.sources[0], layer.layout.shape
        output_dim = 1 if layer.layout.kind in ("transposed", "conv_transposed") else 0
        rows.append(torch.zeros(shape[output_dim], dtype=torch.float64, device=device))
        moments = COMPUTED if layer.compute is not None else _moments(optimizer, groups.get(id(p), {}), p)
        if isinstance(moments, str):
            facts.why_not["state", i] = moments
            continue
        table[k] = adam_sums(*moments).to(device) / copies(p)
        box = extent_of(p).box[-len(shape) :]
        if tuple(p.shape)[-len(shape) :] == shape:  # not so under FSDP1, whose parameters are pieces of a flat vector
            _, _, second, _ = moments
            second = second.reshape([stop - start for start, stop in box])
            row_sums = second.double().transpose(0, output_dim).flatten(1).sum(1)
            rows[k][slice(*box[output_dim])] = row_sums.to(device) / copies(p)
    table, *rows = yield [table, *rows]
    for i, sums, row_sums in zip(layers, table, rows, strict=True):
        if ("state", i) not in facts.why_not:
            for name, value in zip(("n", "ratio", "eps", "mg", "mm", "gg"), sums, strict=True):
                out.put(i, f"adam.{name}", value)
            out.put(i, "dead_rows", dead_row_share(row_sums))
