"""Ways from queries and keys to logits: masks and rotations, as arguments and names suggest them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from spectral_monitor.layers.attention import written_as

MIN_BIAS = -5e3
"""An additive mask forbids keys with a bias up to this one."""
_MASKS = ("attention_mask", "attn_mask", "mask", "context_mask")
_DROPOUTS = ("attention_dropout", "attn_dropout", "attn_drop", "dropout", "dropout_p")

Rotation = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From queries and keys (sequences, heads, length, d) to rotated ones."""


class Mask(NamedTuple):
    """A mask on some rows of some sequences."""

    allowed: Tensor  # broadcasts to (sequences, heads, rows, keys)
    bias: Tensor  # added to logits; 0 where there is none


class Sample(NamedTuple):
    """The part of a batch that is measured."""

    sequences: Tensor  # positions of the sequences in the batch
    rows: Tensor  # positions of the queries in each sequence
    batch: int  # sequences of the batch
    queries: int  # queries of a sequence
    keys: int  # keys of a sequence


def masks(module: nn.Module, arguments: Mapping[str, Any], sample: Sample) -> list[Mask]:
    """Return the masks that may have been used, the likeliest first."""
    rows, keys = sample.rows[:, None], torch.arange(sample.keys, device=sample.rows.device)
    zero = torch.zeros((), device=rows.device)
    causal = Mask((keys <= rows + sample.keys - sample.queries)[None, None], zero)
    full = Mask(torch.ones(1, 1, 1, sample.keys, dtype=torch.bool, device=rows.device), zero)
    tensor = next((arguments[name] for name in _MASKS if isinstance(arguments.get(name), Tensor)), None)
    is_torch = isinstance(module, nn.MultiheadAttention)
    if is_torch and isinstance(padding := arguments.get("key_padding_mask"), Tensor):
        full = _mask(padding[sample.sequences][:, None, None], forbids=True)
    is_causal = arguments.get("is_causal", getattr(module, "is_causal", getattr(module, "causal", None)))
    if tensor is None:
        likely = [full] if sample.queries != sample.keys else [full, causal] if is_causal is False else [causal, full]
        return [_both(full, mask) for mask in likely] if is_torch else likely
    readings = _readings(tensor, sample, getattr(module, "num_heads", 0) if is_torch else 0)
    likely = [_both(full, _mask(reading, forbids=is_torch)) for reading in readings]
    if is_torch:
        return likely
    causal_masks = [_both(mask, causal) for mask in likely if is_causal is True]
    inverted = [_mask(reading, forbids=True) for reading in readings if tensor.dtype == torch.bool]
    return [*causal_masks, *likely, *inverted]


def _both(first: Mask, second: Mask) -> Mask:
    return Mask(first.allowed & second.allowed, first.bias + second.bias)


def _mask(x: Tensor, forbids: bool) -> Mask:
    """Return the mask that a tensor stands for: a bias on logits, or flags that forbid or allow keys."""
    if x.is_floating_point():
        allowed = x > MIN_BIAS
        return Mask(allowed, torch.where(allowed, x, 0.0).float())
    flags = x.bool()
    return Mask(~flags if forbids else flags, torch.zeros((), device=x.device))


def _readings(mask: Tensor, sample: Sample, heads: int) -> list[Tensor]:
    """Return the rows of a mask, of four dimensions, for each way in which its shape can be read."""
    shape = tuple(mask.shape)
    readings = []
    if len(shape) == 3 and heads and shape[0] == sample.batch * heads:
        mask = mask.unflatten(0, (sample.batch, heads))
    elif len(shape) == 3 and shape[0] in (1, sample.batch):
        mask = mask[:, None]
    elif len(shape) == 2 and shape == (sample.queries, sample.keys):
        readings.append(mask[None, None].index_select(2, sample.rows))
    if len(shape) == 2 and shape == (sample.batch, sample.keys):
        readings.append(mask[sample.sequences][:, None, None])
    if mask.ndim == 4 and mask.shape[0] in (1, sample.batch) and mask.shape[2] in (1, sample.queries):
        sampled = mask if mask.shape[0] == 1 else mask[sample.sequences]
        sampled = sampled if sampled.shape[2] == 1 else sampled.index_select(2, sample.rows)
        if sampled.shape[3] >= sample.keys:
            readings.append(sampled[..., : sample.keys])
    return readings


def rotations(module: nn.Module, arguments: Mapping[str, Any], sample: Sample) -> list[Rotation]:
    """Return the rotations that may have been used: by a function in the source file of the module's class."""
    functions = vars(sys.modules[written_as(module).__module__])

    def sampled(x: Tensor) -> Tensor:
        return x[sample.sequences] if x.ndim > 2 and x.shape[0] == sample.batch > 1 else x

    candidates: list[Rotation] = []
    embeddings, apply = arguments.get("position_embeddings"), functions.get("apply_rotary_pos_emb")
    if callable(apply) and isinstance(embeddings, Sequence) and len(embeddings) == 2:
        cos, sin = map(sampled, embeddings)
        candidates.append(lambda q, k: apply(q, k, cos, sin))
    rotary = arguments.get("rotary_pos_emb")
    if callable(apply) and isinstance(rotary, Sequence) and len(rotary) == 2:
        freqs, scale = rotary
        up, down = (1.0, 1.0) if scale is None else (scale, scale**-1)
        candidates.append(lambda q, k: (apply(q, sampled(freqs), up), apply(k, sampled(freqs), down)))
    apply_rope, tables = functions.get("apply_rope"), (arguments.get("cos"), arguments.get("sin"))
    if callable(apply_rope) and all(isinstance(x, Tensor) for x in tables):
        angles = [sampled(x) for x in tables if x is not None]
        width = angles[0].shape[-1]

        def rotated(x: Tensor) -> Tensor:
            return torch.cat([apply_rope(x[..., :width], *angles), x[..., width:]], dim=-1)

        candidates.append(lambda q, k: (rotated(q), rotated(k)))
    return candidates


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
