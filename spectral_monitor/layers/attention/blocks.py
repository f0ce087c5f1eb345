"""Find attention blocks: their query and key projections, and which outputs belong to which head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

ONE_HEAD = "its number of heads is not known, so it is measured as one head; set it with heads={'pattern': number}"


@dataclass(frozen=True)
class Projection:
    """The outputs of a layer that are the queries, keys or values of the heads."""

    layer: int  # index of the layer
    starts: tuple[int, ...]  # first output of each head; the outputs of a head are contiguous
    size: int  # number of outputs of a head

    @property
    def heads(self) -> int:
        """Number of heads."""
        return len(self.starts)

    def rows(self, x: Tensor, dim: int = 0) -> Tensor:
        """Return the entries of ``x`` that belong to heads: its dimension ``dim``, outputs, becomes (heads, size)."""
        step = self.starts[1] - self.starts[0] if self.heads > 1 else self.size
        if step == self.size and self.starts[-1] - self.starts[0] == (self.heads - 1) * self.size:
            outputs = x.narrow(dim, self.starts[0], self.heads * self.size)
        else:
            index = torch.tensor(self.starts, device=x.device)[:, None] + torch.arange(self.size, device=x.device)
            outputs = x.index_select(dim, index.flatten())
        by_head: Tensor = outputs.unflatten(dim, (self.heads, self.size))
        return by_head


@dataclass(frozen=True)
class AttentionBlock:
    """One attention block of a model."""

    name: str  # of its module
    module: nn.Module  # it holds the projections
    query: Projection  # several query heads may share a key head
    key: Projection
    value: Projection | None
    scale: float  # factor of the products of queries and keys
    rotary: bool  # whether queries and keys may be rotated by their positions
    norms: tuple[nn.Module, nn.Module] | None  # they normalize queries and keys
    output: nn.Module | None  # the projection that reads the output of attention; ``None`` if there is none
    heads_known: bool  # whether the number of heads is known
    stated: bool  # whether the scale is known from the module or its class
    tiled: bool = False  # whether query heads that share a key head are interleaved with others instead of adjacent

    @property
    def key_heads(self) -> list[int]:
        """The key head of each query head."""
        group_size = self.query.heads // self.key.heads
        return [h % self.key.heads if self.tiled else h // group_size for h in range(self.query.heads)]

    @property
    def layer(self) -> int:
        """Index of the layer that reports the block's numbers: the query projection."""
        return self.query.layer


def attention_blocks(
    root: nn.Module, layers: Sequence[Layer], heads: Mapping[str, int] | None = None
) -> tuple[AttentionBlock, ...]:
    """Return the attention blocks of a model whose query and key projections are among its measured layers.

    ``heads``: fnmatch pattern on the name of a module or of its query projection -> number of heads.

    Raises:
        ValueError: a pattern matches no block, or a number of heads does not divide the queries.
    """
    heads = dict(heads or {})
    check_counts("heads", heads)
    by_module = {id(layer.module): i for i, layer in enumerate(layers) if layer.module is not None}
    by_name = {layer.info.name: i for i, layer in enumerate(layers)}
    rotary = has_rotary(root)
    blocks: list[AttentionBlock] = []
    names: list[str] = []
    for name, module in named_modules(root):
        site = _torch(name, module, layers, by_name) if isinstance(module, nn.MultiheadAttention) else None
        site = site or _site(module, layers, by_module)
        if site:
            label = layers[site.query.layer].info.name
            names += [name, label]
            block = _block(name, module, site, first_match(heads, name, label) or 0, label)
            blocks.append(replace(block, rotary=block.rotary or rotary))
    if heads and not blocks:
        raise ValueError(f"heads: {next(iter(heads))!r}: no module with projections of queries and keys was found")
    check_patterns("heads", heads, dict.fromkeys(filter(None, names)))
    return tuple(blocks)


@dataclass(frozen=True)
class _Site:
    """Projections that are not yet cut into heads: each start is that of a turn."""

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


def _site(module: nn.Module, layers: Sequence[Layer], by_module: Mapping[int, int]) -> _Site | None:
    """Return the projections that a module holds under known names; ``None`` if it holds none."""

    def index_of(name: str) -> int | None:
        """Return the index of a projection among the layers; ``None`` if the module holds none of this name."""
        child = getattr(module, name, None)
        if not isinstance(child, nn.Module):
            return None
        while id(child) not in by_module and (inner := wrapped(child)) is not None:
            child = inner
        i = by_module.get(id(child))
        if i is None or layers[i].layout.kind not in ("linear", "transposed") or layers[i].info.role == "embedding":
            return None
        return i

    for names in SEPARATE:
        query, key, value = map(index_of, names)
        if query is not None and key is not None and query != key:
            return _separate(layers, query, key, value)
    for name in FUSED:
        if (i := index_of(name)) is not None and (site := _fused(i, layers[i], module, name)) is not None:
            return site
    return None


def _separate(layers: Sequence[Layer], query: int, key: int, value: int | None) -> _Site:
    def all_outputs(i: int) -> Projection:
        return Projection(i, (0,), layers[i].layout.outputs)

    return _Site(all_outputs(query), all_outputs(key), None if value is None else all_outputs(value))


def _fused(i: int, layer: Layer, module: nn.Module, name: str) -> _Site | None:
    """Return the queries, keys and values of a fused layer: in its blocks, or all queries, then keys, then values."""
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
    """Return the numbers of queries, keys and values at one turn, and the number of turns; 0 if unknown.

    ``by_group``: query heads that share keys lie beside them, as in the first versions of Lit-GPT.
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
    heads, stated_size = number(module, *HEADS), number(module, *SIZES)
    if not count and stated_size and _fits(site, stated_size):
        size = stated_size
    if not count and not size and heads and queries % heads == 0:
        size = queries // heads
    if count and not _fits(site, size):
        raise ValueError(f"heads: {label!r}: {count} heads of {size} queries do not fit its keys")
    heads_known = bool(size) and _fits(site, size)
    query, key = site.query, site.key
    if heads_known:
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
    rotary = rotates(module)
    return AttentionBlock(name, module, query, key, value, scale, rotary, norms, output, heads_known, stated, tiled)


def _fits(site: _Site, size: int) -> bool:
    """Return whether queries and keys consist of heads of this size, and each key head has as many query heads."""
    if size < 1 or site.query.size % size or site.key.size % size:
        return False
    queries, keys = (part.heads * part.size // size for part in (site.query, site.key))
    return queries % keys == 0


def _cut(projection: Projection, size: int) -> Projection:
    """Return a projection with the outputs of each turn cut into heads."""
    starts = tuple(start + k * size for start in projection.starts for k in range(projection.size // size))
    return Projection(projection.layer, starts, size)
