"""The heads of an attention block that are in this process, where processes share out queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from spectral_monitor.layers.attention.blocks import AttentionBlock, Projection

SPREAD = "processes share out its queries and keys, and do not have whole heads each"


@dataclass(frozen=True)
class LocalHeads:
    """Heads of which this process has all outputs."""

    # the same block with these heads alone, whose outputs are counted from the first one that is here
    block: AttentionBlock
    first: int  # which head of the whole block the first one is
    total: int  # heads of the whole block


def local_heads(block: AttentionBlock, held: Mapping[int, tuple[int, int] | None]) -> LocalHeads | None:
    """Return the heads that are here; ``None`` unless these are whole, with the keys and the values that they meet.

    ``held``: layer index -> range of its outputs that is here, ``None`` for all of them.
    """
    query = _within(block.query, held[block.query.layer])
    key = _within(block.key, held[block.key.layer])
    value = ([], None) if block.value is None else _within(block.value, held[block.value.layer])
    if query is None or key is None or value is None:
        return None
    (queries, query_part), (keys, key_part), (values, value_part) = query, key, value
    assert query_part is not None
    assert key_part is not None
    if len(queries) % len(keys):
        return None
    found = replace(block, query=query_part, key=key_part, value=value_part)
    met = [keys[k] for k in found.key_heads]
    if met != [block.key_heads[h] for h in queries] or values not in ([], keys):
        return None
    return LocalHeads(found, queries[0], block.query.heads)


def _within(part: Projection, held: tuple[int, int] | None) -> tuple[list[int], Projection | None] | None:
    """Return the heads in a range of outputs, and their projection; ``None`` if one is cut, or none is there."""
    if held is None:
        return list(range(part.heads)), part
    first, last = held
    inside = [h for h, start in enumerate(part.starts) if first <= start and start + part.size <= last]
    touched = [h for h, start in enumerate(part.starts) if start < last and start + part.size > first]
    if not inside or inside != touched or inside != list(range(inside[0], inside[-1] + 1)):
        return None
    return inside, Projection(part.layer, tuple(part.starts[h] - first for h in inside), part.size)
