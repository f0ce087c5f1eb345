"""Fused matrices: which outputs of a projection belong to the query, which to the key, and so on.

Modules are recognized by their names and attributes, so that no library but torch is imported. A split is accepted only
if its sizes add up to the number of outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from spectral_monitor.arguments import is_integer

ATTENTION = "query, key and value"

_PER_HEAD = frozenset(
    {
        *("BloomAttention", "GPTNeoXAttention", "GPTNeoXJapaneseAttention"),
        *("MiniMaxLightningAttention", "PersimmonAttention"),
    }
)
"""Classes whose outputs are grouped by head."""

_GATED = {"gate_up_proj": ("down_proj", "gate and up"), "Wi": ("Wo", "input and gate")}
"""Name of a module -> the module that reads the product of its two halves, and the names of the halves."""

_STATE_SPACE = {
    "MambaMixer": "intermediate_size",
    "FalconMambaMixer": "intermediate_size",
    "JambaMambaMixer": "intermediate_size",
    "Mamba": "d_inner",
}
"""Class whose ``in_proj`` gives states and their gate -> its attribute for the width of each."""


@dataclass(frozen=True)
class Split:
    """The split of a matrix's outputs."""

    block_names: str
    sizes: tuple[int, ...] = ()  # outputs of each block at one turn; empty if they are not known
    repeats: int = 1  # number of turns that the blocks take along the outputs

    def fits(self, outputs: int) -> bool:
        """Return whether the blocks make up these outputs."""
        return min(self.sizes, default=0) > 0 and sum(self.sizes) * self.repeats == outputs

    @property
    def note(self) -> str:
        """The sentence for the role table."""
        turns = f" by turns, {self.repeats} times" if self.repeats > 1 else ""
        widths = [size * self.repeats for size in self.sizes]
        unequal = "" if len(set(widths)) == 1 else f" of {', '.join(map(str, widths))} outputs"
        return f"{self.block_names}{unequal}{turns}"


def split_of(parent: nn.Module, name: str, outputs: int, inputs: int) -> Split | None:
    """Return the blocks of ``parent.<name>``, a matrix outputs x inputs; ``None`` if it does not look fused."""
    if name in _GATED:
        reader, block_names = _GATED[name]
        is_gated = number(getattr(parent, reader, None), "in_features")
        return Split(block_names, (outputs // 2,) * 2) if is_gated else None
    if name == "in_proj":
        width = next((number(parent, key) for cls, key in _STATE_SPACE.items() if is_a(parent, cls)), 0)
        return Split("states and gate", (width, width)) if width else None
    if name == "query_key_value" or (name == "c_attn" and is_a(parent, "GPTBigCodeAttention")):
        return _ordered_by_class(parent, inputs)
    if name in ("qkv", "Wqkv", "qkv_proj", "c_attn"):
        if is_a(parent, "CodeGenAttention"):
            return Split("query, value and key", (inputs // 4,) * 3, 4)
        if getattr(parent, "is_cross_attention", False) is True:
            return Split("key and value", (outputs // 2,) * 2) if outputs == 2 * inputs else Split("key and value")
        if any(is_a(parent, cls) for cls in _PER_HEAD):
            return _ordered_by_class(parent, inputs)
        return _one_after_the_other(parent, outputs, inputs)
    return None


def _one_after_the_other(parent: nn.Module, outputs: int, inputs: int) -> Split:
    """Split outputs into the queries of all heads, then keys, then values; keys and values may have fewer heads."""
    heads, key_heads, size = _heads(parent, inputs)
    split = Split(ATTENTION, (heads * size, key_heads * size, key_heads * size))
    if not split.fits(outputs) and outputs == 3 * inputs:
        return Split(ATTENTION, (inputs,) * 3)
    return split


def _ordered_by_class(parent: nn.Module, inputs: int) -> Split:
    """Split outputs whose order only the class of the module tells."""
    heads, key_heads, size = _heads(parent, inputs)
    by_head = Split(ATTENTION, (size,) * 3, heads)
    if is_a(parent, "FalconAttention") and getattr(parent, "new_decoder_architecture", False):
        return Split(ATTENTION, (heads // max(key_heads, 1) * size, size, size), key_heads)
    if is_a(parent, "FalconAttention") or is_a(parent, "GPTBigCodeAttention"):
        if getattr(parent, "is_cross_attention", False):
            return Split(ATTENTION)
        return Split(ATTENTION, (heads * size, size, size)) if getattr(parent, "multi_query", False) else by_head
    return by_head if any(is_a(parent, cls) for cls in _PER_HEAD) else Split(ATTENTION)


def _heads(parent: nn.Module, inputs: int) -> tuple[int, int, int]:
    """Return the number of query heads, of key heads, and the size of a head; 0 for what is not known."""
    heads = number(parent, "num_heads", "num_attention_heads", "n_heads", "n_head")
    key_heads = number(parent, "num_kv_heads", "num_key_value_heads", "kv_heads") or heads
    size = number(parent, "head_dim", "head_size") or (inputs // heads if heads else 0)
    return heads, key_heads, size


def number(owner: object, *names: str) -> int:
    """Return the first of these attributes of a module or its config that is an integer above 0; 0 if none is."""
    for holder in (owner, getattr(owner, "config", None)):
        for name in names:
            try:
                value = getattr(holder, name, None)
            except Exception:  # some configs refuse attributes that may differ between layers
                continue
            if is_integer(value, 1):
                return value
    return 0


def is_a(module: nn.Module, name: str) -> bool:
    """Return whether a class of this name is the module's class or a base of it."""
    return any(cls.__name__ == name for cls in type(module).__mro__)
