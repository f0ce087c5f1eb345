"""Find attention blocks: their query and key projections, and which outputs belong to which head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from spectral_monitor.layers.attention.names import (
    FUSED,
    HEADS,
    KEY_HEADS,
    OUTPUTS,
    QUERY_NORMS,
    SEPARATE,
    SIZES,
    has_rotary,
    rotates,
    scale_of,
    written_as,
)
from spectral_monitor.layers.fused import number
from spectral_monitor.layers.inspect_model import Layer
from spectral_monitor.layers.naming import check_counts, check_patterns, first_match, join, named_modules, wrapped

ONE_HEAD = "how many heads it has is not known, so it is measured as one: heads={'pattern': number} says"


@dataclass(frozen=True)
class Projection:
    """The outputs of a layer that are the queries, keys or values of the heads."""

    layer: int  # its index
    starts: tuple[int, ...]  # first output of each head; those of a head lie one after the other
    size: int  # outputs of a head

    @property
    def heads(self) -> int:
        """Number of heads."""
        return len(self.starts)

    def rows(self, x: Tensor, dim: int = 0) -> Tensor:
        """Return the part of ``x`` that is of heads: dimension ``dim``, outputs, becomes (heads, size)."""
        step = self.starts[1] - self.starts[0] if self.heads > 1 else self.size
        if step == self.size and self.starts[-1] - self.starts[0] == (self.heads - 1) * self.size:
            found = x.narrow(dim, self.starts[0], self.heads * self.size)
        else:
            index = torch.tensor(self.starts, device=x.device)[:, None] + torch.arange(self.size, device=x.device)
            found = x.index_select(dim, index.flatten())
        by_head: Tensor = found.unflatten(dim, (self.heads, self.size))
        return by_head


@dataclass(frozen=True)
class AttentionBlock:
    """One attention block of a model."""

    name: str  # of its module
    module: nn.Module  # that holds the projections
    query: Projection  # several heads of queries may share one of keys
    key: Projection
    value: Projection | None
    scale: float  # what products of queries and keys are multiplied with
    rotary: bool  # whether queries and keys may be rotated by their positions
    norms: tuple[nn.Module, nn.Module] | None  # modules that normalize queries and keys, if any do
    # the projection that reads what attention returns; ``None`` where that is what the module returns
    output: nn.Module | None
    known: bool  # whether the number of heads is known
    stated: bool  # whether the module says what its scale is, or is of a kind that has one
    tiled: bool = False  # whether heads that share keys take turns, instead of coming one after the other

    @property
    def key_heads(self) -> list[int]:
        """The key head that each head of queries meets."""
        turns = self.query.heads // self.key.heads
        return [h % self.key.heads if self.tiled else h // turns for h in range(self.query.heads)]

    @property
    def layer(self) -> int:
        """Index of the layer that the block's numbers are reported at, the one of its queries."""
        return self.query.layer


def attention_blocks(
    root: nn.Module, layers: Sequence[Layer], heads: Mapping[str, int] | None = None
) -> tuple[AttentionBlock, ...]:
    """Return the attention blocks of a model whose query and key projections are among its measured layers.

    ``heads``: fnmatch pattern on the name of a module or of its query projection -> number of heads.

    Raises:
        ValueError: a pattern that matches no block, a number of heads that does not divide its queries.
    """
    heads = dict(heads or {})
    check_counts("heads", heads)
    by_module = {id(layer.module): i for i, layer in enumerate(layers) if layer.module is not None}
    by_name = {layer.info.name: i for i, layer in enumerate(layers)}
    rotary = has_rotary(root)
    found: list[AttentionBlock] = []
    names: list[str] = []
    for name, module in named_modules(root):
        sites = _torch(name, module, layers, by_name) if isinstance(module, nn.MultiheadAttention) else None
        for site in [sites] if sites else _sites(module, layers, by_module):
            label = layers[site.query.layer].info.name
            names += [name, label]
            block = _block(name, module, site, first_match(heads, name, label) or 0, label)
            found.append(replace(block, rotary=block.rotary or rotary))
    if heads and not found:
        raise ValueError(f"heads: {next(iter(heads))!r}: no module with projections of queries and keys was found")
    check_patterns("heads", heads, dict.fromkeys(filter(None, names)))
    return tuple(found)


@dataclass(frozen=True)
class _Site:
    """Projections before they are cut into heads: each start is that of a turn."""

    query: Projection
    key: Projection
    value: Projection | None


def _torch(
    name: str, module: nn.MultiheadAttention, layers: Sequence[Layer], by_name: Mapping[str, int]
) -> _Site | None:
    """Return the projections of torch's own attention."""
    width = module.embed_dim
    if (i := by_name.get(join(name, "in_proj"))) is not None:
        return _Site(*(Projection(i, (k * width,), width) for k in range(3)))
    query, key, value = (by_name.get(join(name, f"{part}_proj")) for part in "qkv")
    return None if query is None or key is None else _separate(layers, query, key, value)


def _sites(module: nn.Module, layers: Sequence[Layer], by_module: Mapping[int, int]) -> Iterator[_Site]:
    """Yield the projections that a module holds under known names."""

    def held(name: str) -> int | None:
        """Return the place of a projection among the layers; ``None`` if the module holds none of that name."""
        child = getattr(module, name, None)
        if not isinstance(child, nn.Module):
            return None
        while id(child) not in by_module and (inner := wrapped(child)) is not None:
            child = inner
        i = by_module.get(id(child))
        known = (
            i is not None and layers[i].layout.kind in ("linear", "transposed") and layers[i].info.role != "embedding"
        )
        return i if known else None

    for names in SEPARATE:
        query, key, value = map(held, names)
        if query is not None and key is not None and query != key:
            yield _separate(layers, query, key, value)
            return
    for name in FUSED:
        if (i := held(name)) is not None and (site := _fused(i, layers[i], module, name)) is not None:
            yield site
            return


def _separate(layers: Sequence[Layer], query: int, key: int, value: int | None) -> _Site:
    def whole(i: int) -> Projection:
        return Projection(i, (0,), layers[i].layout.outputs)

    return _Site(whole(query), whole(key), None if value is None else whole(value))


def _fused(i: int, layer: Layer, module: nn.Module, name: str) -> _Site | None:
    """Return the queries, keys and values of a fused layer: as its blocks lie, or one kind after the other."""
    layout, total = layer.layout, layer.layout.outputs
    if layout.blocks == 3:
        sizes, turns = layout.sizes or (total // 3 // layout.repeats,) * 3, layout.repeats
    else:
        sizes, turns = _grouped(module, total, by_group=name == "attn") if layout.blocks == 1 else ((), 0)
    if not turns:
        return None
    first, second, third = (int(size) for size in sizes)
    parts = [
        Projection(i, tuple(start + turn * sum(sizes) for turn in range(turns)), size)
        for start, size in zip((0, first, first + second), (first, second, third), strict=True)
    ]
    query, key, value = parts if "query, value and key" not in layer.note else (parts[0], parts[2], parts[1])
    return _Site(query, key, value)


def _grouped(module: nn.Module, total: int, by_group: bool) -> tuple[tuple[int, ...], int]:
    """Return how many outputs are queries, keys and values at one turn, and how many turns there are; 0 if unknown.

    ``by_group``: heads that share their keys lie together with those, as in the first versions of Lit-GPT.
    """
    heads, size, key_heads = number(module, *HEADS), number(module, *SIZES), number(module, *KEY_HEADS)
    if by_group and not key_heads:
        return (), 0
    key_heads = key_heads or heads
    size = size or (total // (heads + 2 * key_heads) if heads else 0)
    if not heads or (heads + 2 * key_heads) * size != total or heads % key_heads:
        return (), 0
    turns = key_heads if by_group else 1
    return (heads * size // turns, key_heads * size // turns, key_heads * size // turns), turns


def _block(name: str, module: nn.Module, site: _Site, count: int, label: str) -> AttentionBlock:
    queries = site.query.heads * site.query.size
    size = queries // count if count else 0
    if count and queries % count:
        raise ValueError(f"heads: {label!r} has {queries} queries, which are not {count} heads of one size")
    heads, stated = number(module, *HEADS), number(module, *SIZES)
    if not count and stated and _fits(site, stated):
        size = stated
    if not count and not size and heads and queries % heads == 0:
        size = queries // heads
    if count and not _fits(site, size):
        raise ValueError(f"heads: {label!r}: {count} heads of {size} queries do not fit its keys")
    known = bool(size) and _fits(site, size)
    query, key = site.query, site.key
    if known:
        query, key = _cut(query, size), _cut(key, size)
    value = site.value
    if value is not None and (value.heads * value.size) % key.heads == 0:
        width = value.heads * value.size // key.heads
        value = _cut(value, width) if value.size % width == 0 else None
    pairs = ((getattr(module, q, None), getattr(module, k, None)) for q, k in QUERY_NORMS)
    norms = next(((q, k) for q, k in pairs if isinstance(q, nn.Module) and isinstance(k, nn.Module)), None)
    if norms is not None and all(isinstance(norm, nn.Identity) for norm in norms):
        norms = None
    outputs = (getattr(module, name, None) for name in OUTPUTS)
    output = next((part for part in outputs if isinstance(part, nn.Module)), None)
    scale, stated = scale_of(module, query.size)
    tiled = written_as(module).__module__.startswith("x_transformers")
    return AttentionBlock(name, module, query, key, value, scale, rotates(module), norms, output, known, stated, tiled)


def _fits(site: _Site, size: int) -> bool:
    """Return whether heads of a size make up queries and keys, and keys are shared evenly."""
    if size < 1 or site.query.size % size or site.key.size % size:
        return False
    queries, keys = (part.heads * part.size // size for part in (site.query, site.key))
    return queries % keys == 0


def _cut(part: Projection, size: int) -> Projection:
    """Return a projection whose outputs at each turn are cut into heads."""
    starts = tuple(start + k * size for start in part.starts for k in range(part.size // size))
    return Projection(part.layer, starts, size)
