"""Logits, entropy and sink of attention on a few rows, with a proof that they are the module's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from spectral_monitor.capture.hooks.attention import AttentionCall
from spectral_monitor.engine.attention.conventions import Mask, Rotation, Sample, dropout_of, masks, rotations
from spectral_monitor.engine.results.raw import Raw
from spectral_monitor.functional.attention import attention_numbers
from spectral_monitor.layers.attention import AttentionBlock, Projection
from spectral_monitor.linalg import AllReduce, Coroutine, rank_table
from spectral_monitor.measurement import NOT_FINITE

ROWS, SEQUENCES = 64, 4
"""Rows of queries that are measured, and sequences of the batch that they are taken from."""
POSITIONS = 1 << 14
"""Limit of the positions in these sequences together, unless a single one has more."""
MAX_WAYS = 4
"""Ways of masking and rotating that are tried."""
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Error, relative to its size, that the output computed from logits may have."""
MIN_CONTRAST = 10.0
"""Tolerances that logits must change the output by if the module does not state its scale: a wrong one has to show."""
WRONG, NOT_A_NUMBER = 1e30, 1e31
"""Errors of a way that is not the module's, and of one whose numbers are not finite."""
COLUMNS = 6
"""Columns of the table of a block, which has a row for each way: whether the block was called; the error in tolerances,
at most 1 if the way is the module's; the largest logit, the mean entropy, the lowest entropy of a head, and the weight
of the first key.
"""
UNKNOWN = (
    "its queries and keys do not reproduce its outputs: the mask, rotary embedding, scale or heads of this module are "
    "not known"
)
NOT_CALLED = "not called in this step, or called where it cannot be seen"


class AttentionStage:
    """The stage of a measured step that measures attention; made for each step.

    A block's numbers count if they explain what the block returned: its output is computed from the same weights and
    the values, and compared. So no convention of masks, heads or rotations is taken on trust.
    """

    def __init__(self, blocks: Sequence[AttentionBlock], processes: AllReduce | None) -> None:
        self._blocks = blocks
        self._processes = processes
        self._tables: dict[int, Tensor] = {}
        self._failures: dict[int, str] = {}
        self._all_tables: Tensor | None = None

    def look(self, block: AttentionBlock, call: AttentionCall) -> None:
        """Measure one call of a block; of several the last one counts."""
        self._failures.pop(block.layer, None)
        try:
            self._tables[block.layer] = _table(block, call)
        except Exception as error:  # such as one in a model's own rotation; the step goes on
            self._tables[block.layer] = _wrong_table()
            self._failures[block.layer] = f"{type(error).__name__}: {error}"

    def routine(self) -> Coroutine[None]:
        """Gather the tables of all processes."""
        if not self._blocks:
            return
        device = next((table.device for table in self._tables.values()), torch.device("cpu"))
        not_called = torch.zeros(MAX_WAYS, COLUMNS, dtype=torch.float64, device=device)
        tables = torch.stack([self._tables.get(block.layer, not_called) for block in self._blocks])
        (self._all_tables,) = yield [rank_table(tables, self._processes)]

    def settle(self, raw: Raw) -> dict[int, str]:
        """Put the numbers of every block that are proved; return layer index -> why there are none."""
        missing: dict[int, str] = {}
        if self._all_tables is None:
            return missing
        tables = self._all_tables.cpu().transpose(0, 1)
        for block, table in zip(self._blocks, tables, strict=True):
            called = table[table[:, 0, 0] > 0]  # (processes, ways, columns)
            proved = [k for k in range(MAX_WAYS) if len(called) and bool((called[:, k, 1] <= 1).all())]
            if proved:
                raw.setdefault(block.layer, {}).update(_joined(called[:, proved[0]]))
            else:
                not_finite = bool((called[:, :, 1] > 2 * WRONG).any())
                reason = NOT_FINITE if not_finite else UNKNOWN if len(called) else NOT_CALLED
                missing[block.layer] = self._failures.get(block.layer, reason)
        return missing


def _joined(rows: Tensor) -> dict[str, tuple[float, ...]]:
    """Return the numbers of all processes, (processes, columns), as one: extremes, or means."""
    numbers = {
        "attention_logit_max": rows[:, 2].amax(),
        "attention_entropy": rows[:, 3].mean(),
        "attention_entropy_lowest": rows[:, 4].amin(),
        "attention_sink": rows[:, 5].mean(),
    }
    return {key: (float(value),) for key, value in numbers.items()}


def _wrong_table() -> Tensor:
    table = torch.full((MAX_WAYS, COLUMNS), WRONG, dtype=torch.float64, device="cpu")
    table[:, 0] = 1.0
    return table


def _table(block: AttentionBlock, call: AttentionCall) -> Tensor:
    """Return the numbers of each way, and the error of its output.

    Raises:
        ValueError: something that is needed was not seen.
    """
    sample, query, key, value, output = _parts(block, call)
    module, arguments = block.module, call.arguments
    rotaries: list[tuple[Rotation | None, bool]] = [(x, block.stated) for x in rotations(module, arguments, sample)]
    rotaries.append((None, block.stated and not (rotaries or block.rotary)))
    ways = [(rotation, mask, sure) for rotation, sure in rotaries for mask in masks(module, arguments, sample)]
    values, bias = _values(block, value)
    table = _wrong_table().to(query.device)
    for way, (rotation, mask, sure) in enumerate(ways[:MAX_WAYS]):
        q, k = (query, key) if rotation is None else rotation(query, key)
        table[way] = _numbers(block, q.index_select(2, sample.rows), k, values, output - bias, mask, sure)
    return table


def _parts(block: AttentionBlock, call: AttentionCall) -> tuple[Sample, Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys and values (sequences, heads, length, d) of a sample, and its rows of outputs.

    Outputs are (sequences, rows, features), in the dtype of the module.
    """
    tensors = call.seen()
    projections: dict[str, Projection | None] = {"query": block.query, "key": block.key, "value": block.value}
    if isinstance(block.module, nn.MultiheadAttention):
        tensors |= {name: call.arguments[name] for name in ("query", "key", "value")}
        if not block.module.batch_first and tensors["query"].ndim == 3:
            tensors = {name: x.transpose(0, 1) for name, x in tensors.items()}
    missing = [name for name in (*projections, "output") if name not in tensors or projections.get(name, 0) is None]
    if missing:
        raise ValueError(f"its {' and '.join(missing)} were not seen")
    query, key, value, output = (_sequences(tensors[name]) for name in (*projections, "output"))
    if len({len(x) for x in (query, key, value, output)}) > 1 or output.shape[1] != query.shape[1]:
        raise ValueError("its queries, keys and outputs do not belong to the same sequences")
    batch, length = query.shape[:2]
    count = max(1, min(SEQUENCES, batch, POSITIONS // max(length, key.shape[1])))
    device = query.device
    sequences = torch.linspace(0, batch - 1, count, device="cpu").round().long().to(device)
    rows = torch.linspace(0, length - 1, min(length, ROWS // count), device="cpu").round().long().to(device)
    sample = Sample(sequences, rows, batch, length, key.shape[1])
    parts = []
    for name, x in zip(projections, (query, key, value), strict=True):
        part = projections[name]
        assert part is not None
        sampled = x[sequences]
        if isinstance(block.module, nn.MultiheadAttention):
            sampled, part = _projected(block.module, name, sampled), _from_zero(part)
        if f"{name}_norm" in tensors:
            parts.append(_normed(tensors[f"{name}_norm"], batch, x.shape[1], part)[sequences])
        else:
            parts.append(part.rows(sampled, dim=-1).transpose(1, 2))
    return sample, parts[0], parts[1], parts[2], output[sequences].index_select(1, rows)


def _sequences(x: Tensor) -> Tensor:
    """Return (..., length, features) as (sequences, length, features)."""
    return x[None] if x.ndim == 2 else x.flatten(0, -3)


def _normed(x: Tensor, batch: int, length: int, part: Projection) -> Tensor:
    """Return normalized queries or keys as (sequences, heads, length, d), whatever the order of dimensions."""
    if x.shape[-1] == part.heads * part.size and x.ndim <= 3:
        return x.reshape(batch, length, part.heads, part.size).transpose(1, 2)
    x = x.reshape(batch, *x.shape[-3:])
    if x.shape[1:] == (length, part.heads, part.size):
        return x.transpose(1, 2)
    if x.shape[1:] != (part.heads, length, part.size):
        raise ValueError(f"normalized queries or keys of shape {tuple(x.shape)} are not supported")
    return x


def _projected(module: nn.MultiheadAttention, name: str, x: Tensor) -> Tensor:
    """Return queries, keys or values of torch's own attention."""
    if module.bias_k is not None or module.add_zero_attn:
        raise ValueError("it adds keys of its own")
    k = ("query", "key", "value").index(name)
    stacked: Tensor | None = module.in_proj_weight
    bias: Tensor | None = module.in_proj_bias
    weight: Tensor = getattr(module, f"{name[0]}_proj_weight") if stacked is None else stacked.chunk(3)[k]
    bias = None if bias is None else bias.chunk(3)[k].to(x.dtype)
    return nn.functional.linear(x, weight.to(x.dtype), bias)


def _from_zero(part: Projection) -> Projection:
    """Return the same heads, counted from the first one, of a projection that stands alone."""
    return Projection(part.layer, tuple(start - part.starts[0] for start in part.starts), part.size)


def _values(block: AttentionBlock, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return what each key adds to the output with weight 1, and the bias of the output.

    The values of torch's own attention have passed its output projection.
    """
    value = _for_query_heads(block, value)
    module = block.module
    if not isinstance(module, nn.MultiheadAttention):
        return value, torch.zeros((), device=value.device)
    weight = module.out_proj.weight.to(value.dtype).unflatten(1, (block.query.heads, -1)).movedim(1, 0)  # (H, out, d)
    bias: Tensor | None = module.out_proj.bias
    return value @ weight.mT, torch.zeros((), device=value.device) if bias is None else bias


def _for_query_heads(block: AttentionBlock, x: Tensor) -> Tensor:
    """Return keys or values for each head of queries; several heads may share them."""
    return x if x.shape[1] == block.query.heads else x[:, block.key_heads]


def _output(block: AttentionBlock, weights: Tensor, values: Tensor) -> Tensor:
    """Return the output of attention with these weights: (sequences, rows, features)."""
    by_head = weights.to(values.dtype) @ values  # (sequences, heads, rows, d)
    return by_head.sum(1) if isinstance(block.module, nn.MultiheadAttention) else by_head.transpose(1, 2).flatten(2)


def _numbers(
    block: AttentionBlock, query: Tensor, key: Tensor, values: Tensor, output: Tensor, mask: Mask, sure: bool
) -> Tensor:
    """Return the columns of one way: that the block was called, the error, and the numbers.

    ``sure``: whether scale and rotation are known; if not, logits must change the output clearly.
    """
    tolerance = TOLERANCE.get(output.dtype, 1e-4)
    if output.is_cuda and output.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32:
        tolerance = TOLERANCE[torch.float16]
    dtype = torch.promote_types(output.dtype, torch.float32)
    query, key, values, output = (x.to(dtype) for x in (query, key, values, output))
    logits = query @ _for_query_heads(block, key).mT * block.scale
    cap = getattr(block.module, "attn_logit_softcapping", None)
    if isinstance(cap, float):
        logits = cap * torch.tanh(logits / cap)
    logits = logits + mask.bias.to(dtype)
    allowed = mask.allowed.expand_as(logits)
    weights = torch.where(allowed, logits, -torch.inf).softmax(-1).nan_to_num(0.0)
    numbers = attention_numbers(logits, mask.allowed, weights)
    attending = allowed.any(-1).all(1)[..., None]  # rows with an allowed key in every head
    computed = _output(block, weights, values)
    if computed.shape != output.shape:
        raise ValueError(f"it returned {output.shape[-1]} features, its values have {computed.shape[-1]}")
    uniform = _output(block, allowed / allowed.sum(-1, keepdim=True).clamp(min=1), values)
    differences = (computed - output, output, computed - uniform)
    deviation, size, contrast = (torch.linalg.vector_norm(x * attending) for x in differences)
    error = deviation / size / tolerance
    if sure and (share := dropout_of(block.module)):
        scatter = (weights.square() @ values.square().sum(-1, keepdim=True) * attending[:, None]).sum()
        noise = deviation.square() / (scatter * share / (1 - share))
        error = torch.minimum(error, noise.log2().abs())
    if not sure:
        error = torch.where(contrast > MIN_CONTRAST * tolerance * size, error, WRONG)
    finite = deviation.isfinite() & numbers.logit_max.isfinite()
    error = torch.where(finite, error.nan_to_num(WRONG, WRONG), NOT_A_NUMBER)
    return torch.stack([torch.ones_like(error), error, *numbers]).double()
