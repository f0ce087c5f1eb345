"""The heads of an attention block that this process has, where queries and keys are divided among processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from spectral_monitor.layers.attention.blocks import AttentionBlock, Projection

SPREAD = "its queries and keys are sharded over processes, and no process has whole heads"


@dataclass(frozen=True)
class LocalHeads:
    """The heads of which this process has all outputs."""

    block: AttentionBlock  # the block with these heads only; its outputs are counted from the first local one
    first: int  # index of the first local head in the full block
    total: int  # number of heads of the full block


def local_heads(block: AttentionBlock, local_ranges: Mapping[int, tuple[int, int] | None]) -> LocalHeads | None:
    """Return the local heads; ``None`` if one is cut or lacks its keys or values here.

    ``local_ranges``: layer index -> range of its outputs that this process has, ``None`` for all of them.
    """
    query = _within(block.query, local_ranges[block.query.layer])
    key = _within(block.key, local_ranges[block.key.layer])
    value = ([], None) if block.value is None else _within(block.value, local_ranges[block.value.layer])
    if query is None or key is None or value is None:
        return None
    (queries, query_part), (keys, key_part), (values, value_part) = query, key, value
    assert query_part is not None
    assert key_part is not None
    if len(queries) % len(keys):
        return None
    local = replace(block, query=query_part, key=key_part, value=value_part)
    local_key_heads = [keys[k] for k in local.key_heads]
    if local_key_heads != [block.key_heads[h] for h in queries] or values not in ([], keys):
        return None
    return LocalHeads(local, queries[0], block.query.heads)


def _within(full: Projection, local_range: tuple[int, int] | None) -> tuple[list[int], Projection | None] | None:
    """Return the heads in a range of outputs, and their projection; ``None`` if a head is cut or none is inside."""
    if local_range is None:
        return list(range(full.heads)), full
    first, last = local_range
    inside = [h for h, start in enumerate(full.starts) if first <= start and start + full.size <= last]
    touched = [h for h, start in enumerate(full.starts) if start < last and start + full.size > first]
    if not inside or inside != touched or inside != list(range(inside[0], inside[-1] + 1)):
        return None
    return inside, Projection(full.layer, tuple(full.starts[h] - first for h in inside), full.size)
