"""Logits, entropy and sink of attention on a few rows, and the proof that they are those of the module."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from spectral_monitor.capture.hooks.attention import AttentionCall
from spectral_monitor.engine.attention.conventions import Mask, Sample, dropout_of, masks, rotations
from spectral_monitor.engine.results.raw import Raw
from spectral_monitor.functional.attention import attention_numbers
from spectral_monitor.layers.attention import AttentionBlock, Projection
from spectral_monitor.linalg import AllReduce, Coroutine, rank_table
from spectral_monitor.measurement import NOT_FINITE

ROWS, SEQUENCES = 64, 4
"""Rows of queries that are looked at, and sequences of the batch that they are taken from."""
POSITIONS = 1 << 14
"""Positions of all of these sequences, at most, unless a single one has more."""
WAYS = 4
"""Ways of masking and rotating that are tried."""
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""How far, relative to its size, what attention returned may be from what logits say it is."""
SHARP = 10.0
"""Times the tolerance that logits must change what attention returns, where the module does not state its scale, for
then a wrong one has to show.
"""
WRONG, UNSOUND = 1e30, 1e31
COLUMNS = 6
"""Of the table of a block, which has a row for each way: whether it was seen; how far it is off, at most 1 where it is
the module's; the largest logit, the mean entropy, the lowest one of a head, and the weight of the first key.
"""
UNKNOWN = (
    "its queries and keys do not give what it returned: the mask, the rotation, the scale or the heads of this module "
    "are not known"
)
NOT_CALLED = "not called in this step, or where it cannot be seen"


class AttentionStage:
    """The stage of a measured step that measures attention; made for each step.

    A block's numbers count where they explain what the block returned: from the same weights, and the values, its
    output is computed and compared. So no convention of masks, heads or rotations is taken on trust.
    """

    def __init__(self, blocks: Sequence[AttentionBlock], processes: AllReduce | None) -> None:
        self._blocks = blocks
        self._processes = processes
        self._tables: dict[int, Tensor] = {}
        self._why: dict[int, str] = {}
        self._total: Tensor | None = None

    def look(self, block: AttentionBlock, call: AttentionCall) -> None:
        """Measure one call of a block; of several the last one counts."""
        self._why.pop(block.layer, None)
        try:
            self._tables[block.layer] = _table(block, call)
        except Exception as error:  # of a model's own rotation, say; the step goes on
            self._tables[block.layer] = _empty()
            self._why[block.layer] = f"{type(error).__name__}: {error}"

    def routine(self) -> Coroutine[None]:
        """Gather the tables of all processes."""
        if not self._blocks:
            return
        device = next((table.device for table in self._tables.values()), torch.device("cpu"))
        nothing = torch.zeros(WAYS, COLUMNS, dtype=torch.float64, device=device)
        mine = torch.stack([self._tables.get(block.layer, nothing) for block in self._blocks])
        (self._total,) = yield [rank_table(mine, self._processes)]

    def settle(self, raw: Raw) -> dict[int, str]:
        """Put the numbers of every block that are proved; return layer index -> why there are none."""
        missing: dict[int, str] = {}
        if self._total is None:
            return missing
        tables = self._total.cpu().transpose(0, 1)
        for block, table in zip(self._blocks, tables, strict=True):
            seen = table[table[:, 0, 0] > 0]  # (processes, ways, columns)
            proved = [k for k in range(WAYS) if len(seen) and bool((seen[:, k, 1] <= 1).all())]
            if proved:
                raw.setdefault(block.layer, {}).update(_joined(seen[:, proved[0]]))
            else:
                lost = bool((seen[:, :, 1] > 2 * WRONG).any())
                why = NOT_FINITE if lost else UNKNOWN if len(seen) else NOT_CALLED
                missing[block.layer] = self._why.get(block.layer, why)
        return missing


def _joined(seen: Tensor) -> dict[str, list[float]]:
    """Return the numbers of all processes as one: extremes, or means."""
    found = {
        "attention_logit_max": seen[:, 2].amax(),
        "attention_entropy": seen[:, 3].mean(),
        "attention_entropy_lowest": seen[:, 4].amin(),
        "attention_sink": seen[:, 5].mean(),
    }
    return {key: [float(value)] for key, value in found.items()}


def _empty() -> Tensor:
    table = torch.full((WAYS, COLUMNS), WRONG, dtype=torch.float64, device="cpu")
    table[:, 0] = 1.0
    return table


def _table(block: AttentionBlock, call: AttentionCall) -> Tensor:
    """Return the numbers of each way, and how far its output is off.

    Raises:
        ValueError: something that is needed was not seen.
    """
    sample, query, key, value, output = _parts(block, call)
    module, arguments = block.module, call.arguments
    turns = rotations(module, arguments, sample)
    given = [(turn, block.stated) for turn in turns] + [(None, block.stated and not (turns or block.rotary))]
    ways = [(turn, mask, sure) for turn, sure in given for mask in masks(module, arguments, sample)][:WAYS]
    values, bias = _values(block, value)
    found = []
    for turn, mask, sure in ways:
        q, k = (query, key) if turn is None else turn(query, key)
        found.append(_numbers(block, q.index_select(2, sample.rows), k, values, output - bias, mask, sure))
    table = _empty().to(query.device)
    return torch.cat([torch.stack(found), table[len(found) :]]) if found else table


def _parts(block: AttentionBlock, call: AttentionCall) -> tuple[Sample, Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys and values (sequences, heads, length, d) of a sample, and its rows of outputs.

    Outputs are (sequences, rows, features), in the dtype of the module.
    """
    seen = call.seen()
    projections: dict[str, Projection | None] = {"query": block.query, "key": block.key, "value": block.value}
    ours = isinstance(block.module, nn.MultiheadAttention)
    if ours:
        assert isinstance(block.module, nn.MultiheadAttention)
        seen |= {name: call.arguments[name] for name in ("query", "key", "value")}
        if not block.module.batch_first and seen["query"].ndim == 3:
            seen = {name: x.transpose(0, 1) for name, x in seen.items()}
    missing = [name for name in (*projections, "output") if name not in seen or projections.get(name, 0) is None]
    if missing:
        raise ValueError(f"its {' and '.join(missing)} were not seen")
    query, key, value, output = (_sequences(seen[name]) for name in (*projections, "output"))
    if len({len(x) for x in (query, key, value, output)}) > 1 or output.shape[1] != query.shape[1]:
        raise ValueError("its queries, keys and outputs are not of the same sequences")
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
        some = x[sequences]
        if ours:
            some, part = _projected(block.module, name, some), _from_zero(part)
        if f"{name}_norm" in seen:
            parts.append(_normed(seen[f"{name}_norm"], batch, x.shape[1], part)[sequences])
        else:
            parts.append(part.rows(some, dim=-1).transpose(1, 2))
    return sample, parts[0], parts[1], parts[2], output[sequences].index_select(1, rows)


def _sequences(x: Tensor) -> Tensor:
    """Return (..., length, features) as (sequences, length, features)."""
    return x[None] if x.ndim == 2 else x.flatten(0, -3)


def _normed(x: Tensor, batch: int, length: int, part: Projection) -> Tensor:
    """Return normalized queries or keys as (sequences, heads, length, d), whichever way they lie."""
    if x.shape[-1] == part.heads * part.size and x.ndim <= 3:
        return x.reshape(batch, length, part.heads, part.size).transpose(1, 2)
    x = x.reshape(batch, *x.shape[-3:])
    if x.shape[1:] == (length, part.heads, part.size):
        return x.transpose(1, 2)
    if x.shape[1:] != (part.heads, length, part.size):
        raise ValueError(f"normalized queries or keys of shape {tuple(x.shape)} are not known")
    return x


def _projected(module: nn.Module, name: str, x: Tensor) -> Tensor:
    """Return what torch's own attention makes of its inputs."""
    assert isinstance(module, nn.MultiheadAttention)
    if module.bias_k is not None or module.add_zero_attn:
        raise ValueError("it adds keys of its own")
    k = ("query", "key", "value").index(name)
    whole: Tensor | None = module.in_proj_weight
    bias: Tensor | None = module.in_proj_bias
    weight: Tensor = getattr(module, f"{name[0]}_proj_weight") if whole is None else whole.chunk(3)[k]
    bias = None if bias is None else bias.chunk(3)[k].to(x.dtype)
    return nn.functional.linear(x, weight.to(x.dtype), bias)


def _from_zero(part: Projection) -> Projection:
    """Return the same heads of a projection that is alone."""
    return Projection(part.layer, tuple(start - part.starts[0] for start in part.starts), part.size)


def _values(block: AttentionBlock, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return what each key adds to the output where a head looks at it alone, and what is added to that.

    Of torch's own attention that has passed the output projection.
    """
    value = _met(block, value)
    module = block.module
    if not isinstance(module, nn.MultiheadAttention):
        return value, torch.zeros((), device=value.device)
    weight = module.out_proj.weight.to(value.dtype).unflatten(1, (block.query.heads, -1)).movedim(1, 0)  # (H, out, d)
    bias: Tensor | None = module.out_proj.bias
    return value @ weight.mT, torch.zeros((), device=value.device) if bias is None else bias


def _met(block: AttentionBlock, x: Tensor) -> Tensor:
    """Return what each head of queries meets of keys or values, which several may share."""
    return x if x.shape[1] == block.query.heads else x[:, block.key_heads]


def _whole(block: AttentionBlock, weights: Tensor, values: Tensor) -> Tensor:
    """Return what attention returns with some weights: (sequences, rows, features)."""
    by_head = weights.to(values.dtype) @ values  # (sequences, heads, rows, d)
    return by_head.sum(1) if isinstance(block.module, nn.MultiheadAttention) else by_head.transpose(1, 2).flatten(2)


def _numbers(
    block: AttentionBlock, query: Tensor, key: Tensor, values: Tensor, output: Tensor, mask: Mask, sure: bool
) -> Tensor:
    """Return the columns of one way: that it was seen, how far off it is, and the numbers."""
    tolerance = TOLERANCE.get(output.dtype, 1e-4)
    if output.is_cuda and output.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32:
        tolerance = TOLERANCE[torch.float16]
    dtype = torch.promote_types(output.dtype, torch.float32)
    query, key, values, output = (x.to(dtype) for x in (query, key, values, output))
    key = _met(block, key)
    logits = query @ key.mT * block.scale
    cap = getattr(block.module, "attn_logit_softcapping", None)
    if isinstance(cap, float):
        logits = cap * torch.tanh(logits / cap)
    logits = logits + mask.bias.to(dtype)
    allowed = mask.allowed.expand_as(logits)
    weights = torch.where(allowed, logits, -torch.inf).softmax(-1).nan_to_num(0.0)
    numbers = attention_numbers(logits, mask.allowed, weights)
    some = allowed.any(-1).all(1)[..., None]  # rows that see a key in every head
    whole = _whole(block, weights, values)
    if whole.shape != output.shape:
        raise ValueError(f"it returned {output.shape[-1]} features, its values have {whole.shape[-1]}")
    even = _whole(block, allowed / allowed.sum(-1, keepdim=True).clamp(min=1), values)
    wrong, size, change = (torch.linalg.vector_norm(x * some) for x in (whole - output, output, whole - even))
    off = wrong / size / tolerance
    sharp = change > SHARP * tolerance * size
    if share := dropout_of(block.module):
        scatter = (weights.square() @ values.square().sum(-1, keepdim=True) * some[:, None]).sum()
        noise = wrong.square() / (scatter * share / (1 - share))
        off = torch.minimum(off, noise.log2().abs()) if sure else off
    if not sure:
        off = torch.where(sharp, off, WRONG)
    known = wrong.isfinite() & numbers.logit_max.isfinite()
    off = torch.where(known, off.nan_to_num(WRONG, WRONG), UNSOUND)
    return torch.stack([torch.ones_like(off), off, *numbers]).double()
