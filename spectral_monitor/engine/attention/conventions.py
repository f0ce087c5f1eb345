"""Ways from queries and keys to logits: masks and rotations, as arguments and names suggest them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from spectral_monitor.layers.attention import written_as

LEAST = -5e3
"""Additive masks below this forbid a key."""
_MASKS = ("attention_mask", "attn_mask", "mask", "context_mask")
_DROPOUTS = ("attention_dropout", "attn_dropout", "attn_drop", "dropout", "dropout_p")

Rotation = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From queries and keys (sequences, heads, length, d) to rotated ones."""


class Mask(NamedTuple):
    """A mask on some rows of some sequences."""

    allowed: Tensor  # broadcasts to (sequences, heads, rows, keys)
    bias: Tensor  # is added to logits; 0 where there is none


class Sample(NamedTuple):
    """The part of a batch that is looked at."""

    sequences: Tensor  # their places in the batch
    rows: Tensor  # of queries, in each
    batch: int  # sequences of the batch
    queries: int  # length of one
    keys: int  # the same of keys


def masks(module: nn.Module, arguments: Mapping[str, Any], sample: Sample) -> list[Mask]:
    """Return the masks that may have been used, the likeliest first."""
    rows, keys = sample.rows[:, None], torch.arange(sample.keys, device=sample.rows.device)
    free = torch.ones(1, 1, 1, sample.keys, dtype=torch.bool, device=rows.device)
    causal = Mask((keys <= rows + sample.keys - sample.queries)[None, None], torch.zeros((), device=rows.device))
    full = Mask(free, torch.zeros((), device=rows.device))
    given = next((arguments[name] for name in _MASKS if isinstance(arguments.get(name), Tensor)), None)
    torchs = isinstance(module, nn.MultiheadAttention)
    if torchs and isinstance(padding := arguments.get("key_padding_mask"), Tensor):
        full = _mask(padding[sample.sequences][:, None, None], forbids=True)
    says = arguments.get("is_causal", getattr(module, "is_causal", getattr(module, "causal", None)))
    if given is None:
        found = [full] if sample.queries != sample.keys else [full, causal] if says is False else [causal, full]
        return [_both(full, mask) for mask in found] if torchs else found
    cut = _cut(given, sample, getattr(module, "num_heads", 0) if torchs else 0)
    likely = [_both(full, _mask(part, forbids=torchs)) for part in cut]
    found = [*(_both(mask, causal) for mask in likely if says is True and not torchs), *likely]
    if given.dtype == torch.bool and not torchs:
        found += [_mask(part, forbids=True) for part in cut]
    return found


def _both(first: Mask, second: Mask) -> Mask:
    return Mask(first.allowed & second.allowed, first.bias + second.bias)


def _mask(x: Tensor, forbids: bool) -> Mask:
    """Return a mask that has numbers that are added, or says what is allowed, or what is not."""
    if x.is_floating_point():
        allowed = x > LEAST
        return Mask(allowed, torch.where(allowed, x, 0.0).float())
    says = x.bool()
    return Mask(~says if forbids else says, torch.zeros((), device=x.device))


def _cut(given: Tensor, sample: Sample, heads: int) -> list[Tensor]:
    """Return the rows of a mask in the ways in which its shape can be read, as four dimensions."""
    shape = tuple(given.shape)
    found = []
    if len(shape) == 3 and heads and shape[0] == sample.batch * heads:
        given = given.unflatten(0, (sample.batch, heads))
    elif len(shape) == 3 and shape[0] in (1, sample.batch):
        given = given[:, None]
    elif len(shape) == 2 and shape == (sample.queries, sample.keys):
        found.append(given[None, None].index_select(2, sample.rows))
    if len(shape) == 2 and shape == (sample.batch, sample.keys):
        found.append(given[sample.sequences][:, None, None])
    if given.ndim == 4 and given.shape[0] in (1, sample.batch) and given.shape[2] in (1, sample.queries):
        some = given if given.shape[0] == 1 else given[sample.sequences]
        some = some if some.shape[2] == 1 else some.index_select(2, sample.rows)
        if some.shape[3] >= sample.keys:
            found.append(some[..., : sample.keys])
    return found


def rotations(module: nn.Module, arguments: Mapping[str, Any], sample: Sample) -> list[Rotation]:
    """Return the rotations that may have been used: by the function that stands beside the module."""
    beside = vars(sys.modules[written_as(module).__module__])

    def some(x: Tensor) -> Tensor:
        return x[sample.sequences] if x.ndim > 2 and x.shape[0] == sample.batch > 1 else x

    found: list[Rotation] = []
    pair, apply = arguments.get("position_embeddings"), beside.get("apply_rotary_pos_emb")
    if callable(apply) and isinstance(pair, Sequence) and len(pair) == 2:
        cos, sin = map(some, pair)
        found.append(lambda q, k: apply(q, k, cos, sin))
    both = arguments.get("rotary_pos_emb")
    if callable(apply) and isinstance(both, Sequence) and len(both) == 2:
        freqs, scale = both
        up, down = (1.0, 1.0) if scale is None else (scale, scale**-1)
        found.append(lambda q, k: (apply(q, some(freqs), up), apply(k, some(freqs), down)))
    rope, angles = beside.get("apply_rope"), (arguments.get("cos"), arguments.get("sin"))
    if callable(rope) and all(isinstance(x, Tensor) for x in angles):
        turned = [some(x) for x in angles if x is not None]
        width = turned[0].shape[-1]

        def turn(x: Tensor) -> Tensor:
            return torch.cat([rope(x[..., :width], *turned), x[..., width:]], dim=-1)

        found.append(lambda q, k: (turn(q), turn(k)))
    return found


def dropout_of(module: nn.Module) -> float:
    """Return the share of weights that a module in training may drop; 0 if none is known."""
    if not module.training:
        return 0.0
    for name in _DROPOUTS:
        value = getattr(module, name, None)
        share = value.p if isinstance(value, nn.Dropout) else value
        if isinstance(share, float) and 0 < share < 1:
            return share
    return 0.0
