"""Queries and keys of attention blocks: the norm of their bilinear form, and that of its change in a step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spectral_monitor.capture.unwrap import parameters_of
from spectral_monitor.engine.results.raw import RawScalars
from spectral_monitor.engine.settings import Settings
from spectral_monitor.engine.weights.matrix_batches import BatchMember
from spectral_monitor.functional.attention import bilinear_change_norm, bilinear_norm, product_bound
from spectral_monitor.layers.attention import ONE_HEAD, SPREAD, AttentionBlock, LocalHeads, Projection, written_as
from spectral_monitor.linalg import Coroutine
from spectral_monitor.sharding import ProcessGroup
from spectral_monitor.state.buffers import kept
from spectral_monitor.state.dtensor import local_part

STACKED = 1 << 24
"""Limit of the entries of queries and keys in one call."""
NORMALIZED = "queries and keys are normalized, so the size of their weights does not affect the logits"
NO_GAIN = "queries and keys are normalized in a way that is not known"
ROTARY = "there are, or may be, rotary embeddings between queries and keys: it is the bound |W_q|* |W_k|* of each head"
NORMS = "queries and keys are normalized: it is the bound given by their gains"
_ONE_PLUS = ("Gemma", "T5Gemma", "Qwen3Next", "RecurrentGemma")
"""Beginnings of the names of norms whose gain is 1 + weight."""

Weights = tuple[Tensor, Tensor]
"""Queries (heads, d, n_q) and the keys (heads, d, n_k) that they meet, of one block."""


def unmeasured(block: AttentionBlock, heads: LocalHeads | None) -> dict[str, str]:
    """Return quantity -> why it is missing for a block, as far as that is known before training.

    ``heads``: those with local weights; ``None`` if heads are split.
    """
    spread = heads is None or heads.block.query.heads < heads.total
    if heads is None or (spread and block.norms is not None):  # its gains are split, too
        return dict.fromkeys(("qk_gain", "qk_gain_head", "qk_update"), SPREAD)
    normalized = block.norms is not None or getattr(block.module, "qk_norm", False) is True
    reasons = {"qk_update": NORMALIZED} if normalized else {}
    if normalized and (block.norms is None or _bound(block) is None):
        reasons |= dict.fromkeys(("qk_gain", "qk_gain_head"), NO_GAIN)
    return reasons


def remarks(block: AttentionBlock) -> dict[str, str]:
    """Return quantity -> a remark on its values: which bound they are, and that the heads are not known."""
    kind = NORMS if block.norms is not None else ROTARY if block.rotary else ""
    remark = "; ".join(filter(None, [kind, "" if block.heads_known else ONE_HEAD]))
    return dict.fromkeys(("qk_gain", "qk_update"), remark) if remark else {}


class QueryKeyStage:
    """The stage of a measured step that measures queries and keys; made for each step.

    It measures the heads whose weights are in this process; where those are not all, the processes exchange results.
    """

    def __init__(
        self,
        heads: Mapping[int, LocalHeads | None],
        members: Sequence[BatchMember],
        settings: Settings,
        processes: ProcessGroup | None,
        out: RawScalars,
    ) -> None:
        """``heads``: layer index -> the local heads of its block; ``None`` if heads are split."""
        wanted = heads if settings.needs & {"qk", "dqk"} else {}
        self._heads_of = {i: local for i, local in wanted.items() if local is not None}
        self._blocks = {
            i: local.block
            for i, local in self._heads_of.items()
            if SPREAD not in unmeasured(local.block, local).values()
        }
        self._members = members
        self._processes = processes
        self._parts: dict[tuple[int, str], Tensor] = {}
        self._changes = "dqk" in settings.needs
        self._host = settings.low_memory
        self._out = out
        self._before: dict[int, Weights] = {}
        self._done: set[int] = set()

    @torch.no_grad()
    def before(self, optimizer: Optimizer) -> None:
        """Measure the blocks that an optimizer is about to change, and copy them if their change is measured."""
        owned = {id(p) for p in parameters_of(optimizer)}
        blocks = [block for block in self._blocks.values() if self._sources(block) & owned]
        if self._changes:
            copies = {block.layer: self._weights(block) for block in blocks if block.layer not in self._before}
            self._before |= {i: (kept(q, self._host), kept(k, self._host)) for i, (q, k) in copies.items()}
        self._measure([block for block in blocks if block.layer not in self._done])

    @torch.no_grad()
    def rest(self) -> None:
        """Measure the changes, after all optimizers have stepped, and the blocks that none has stepped."""
        self._measure([block for i, block in self._blocks.items() if i not in self._done])
        moved = [self._blocks[i] for i in self._before if self._blocks[i].norms is None]
        for blocks in self._groups(moved):
            old = [self._before[block.layer] for block in blocks]
            device = self._weights(blocks[0])[0].device
            queries, keys = (torch.stack([pair[k].to(device) for pair in old]) for k in (0, 1))
            new_queries, new_keys = (torch.stack(x) for x in zip(*map(self._weights, blocks), strict=True))
            if blocks[0].rotary:
                norms = product_bound((new_queries.double() - queries), new_keys)
                norms = norms + product_bound(queries, new_keys.double() - keys)
            else:
                norms = bilinear_change_norm(queries, keys, new_queries, new_keys)
            self._put("qk.update", blocks, norms * math.sqrt(queries.shape[-1] * keys.shape[-1]))
        self._before.clear()

    def _measure(self, blocks: Sequence[AttentionBlock]) -> None:
        self._done.update(block.layer for block in blocks)
        for block in blocks:
            if block.norms is not None and (bound := _bound(block)) is not None:
                self._out.put(block.layer, "qk.gain", bound)
        for group in self._groups([block for block in blocks if block.norms is None]):
            queries, keys = (torch.stack(x) for x in zip(*map(self._weights, group), strict=True))
            norms = product_bound(queries, keys) if group[0].rotary else bilinear_norm(queries, keys)
            self._put("qk.gain", group, norms * math.sqrt(queries.shape[-1] * keys.shape[-1]))

    def _put(self, name: str, blocks: Sequence[AttentionBlock], norms: Tensor) -> None:
        for block, values in zip(blocks, norms, strict=True):
            heads = self._heads_of[block.layer]
            if len(values) == heads.total or self._processes is None:
                self._out.put(block.layer, name, values * block.scale)
            else:  # this process's share of the values of all heads
                share = values.new_zeros(heads.total)
                copies = self._processes.size // self._members[block.layer].holding.extent.spread
                share[heads.first : heads.first + len(values)] = values * block.scale / copies
                self._parts[block.layer, name] = share

    def routine(self) -> Coroutine[None]:
        """Put the values of blocks whose heads are split over processes."""
        if self._parts:
            keys = sorted(self._parts)
            totals = yield [self._parts[key] for key in keys]
            for (i, name), values in zip(keys, totals, strict=True):
                self._out.put(i, name, values)

    def _groups(self, blocks: Sequence[AttentionBlock]) -> Iterator[list[AttentionBlock]]:
        """Yield groups of blocks of one shape, as large as memory allows."""
        groups: dict[object, list[AttentionBlock]] = defaultdict(list)
        for block in blocks:
            query, key = self._members[block.query.layer], self._members[block.key.layer]
            shape = (block.query.heads, block.key.heads, block.query.size, block.rotary)
            groups[(*shape, *query.kind[1:4], *key.kind[1:4])].append(block)
        for group in groups.values():
            first = group[0]
            size = (first.query.heads + first.key.heads) * first.query.size
            capacity = max(1, STACKED // max(size * self._members[first.layer].layer.layout.fan_in, 1))
            for start in range(0, len(group), capacity):
                yield group[start : start + capacity]

    def _sources(self, block: AttentionBlock) -> set[int]:
        parts = (block.query.layer, block.key.layer)
        return {id(p) for i in parts for p in self._members[i].layer.sources}

    def _weights(self, block: AttentionBlock) -> Weights:
        query, key = self._heads(block.query), self._heads(block.key)
        return query, key if len(key) == len(query) else key[block.key_heads]

    def _heads(self, part: Projection) -> Tensor:
        layer = self._members[part.layer].layer
        weight, shape = local_part(layer.weight()), layer.layout.shape
        if layer.layout.kind == "transposed":
            return part.rows(weight.reshape(shape[0], -1).mT)
        return part.rows(weight.reshape(-1, shape[1]))


def _bound(block: AttentionBlock) -> Tensor | None:
    """Return the largest logit that normalized queries and keys can have; ``None`` if their gains are not known.

    The length of a head's vector is the root of the number of entries that are normalized together, times its gain.
    """
    assert block.norms is not None
    query, key = map(_gain, block.norms)
    if query is None or key is None:
        return None
    sizes = [block.query.size if gain.numel() in (1, block.query.size) else gain.numel() for gain in (query, key)]
    if query.shape == key.shape and not block.rotary:
        largest = (query * key).abs().amax()
    else:
        largest = query.abs().amax() * key.abs().amax()
    return largest * (block.scale * math.sqrt(math.prod(sizes)))


def _gain(norm: nn.Module) -> Tensor | None:
    """Return the gain of a normalization layer; ``None`` if its kind is not known."""
    parameters = dict(norm.named_parameters())
    name = written_as(norm).__name__
    if "norm" not in name.lower() or set(parameters) - {"weight", "bias"} or "weight" not in parameters:
        return None
    gain = local_part(parameters["weight"].detach()).float().flatten()
    return gain + 1 if name.startswith(_ONE_PLUS) else gain
