"""Names that attention modules give to their parts: they are recognized without importing their libraries."""

from __future__ import annotations

import inspect
import re

from torch import nn

SEPARATE = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("to_q", "to_k", "to_v"),
    ("q_lin", "k_lin", "v_lin"),
    ("wq", "wk", "wv"),
    ("Wq", "Wk", "Wv"),
    ("query_proj", "key_proj", "value_proj"),
    ("q_linear", "k_linear", "v_linear"),
    ("linear_q", "linear_k", "linear_v"),
    ("q", "k", "v"),
)
"""Projections of queries, keys and values in a module each."""
FUSED = ("qkv", "Wqkv", "qkv_proj", "c_attn", "query_key_value", "to_qkv", "attn")
"""A single projection for all three."""
OUTPUTS = ("o_proj", "out_proj", "c_proj", "proj", "to_out", "dense", "out_lin", "wo", "Wo", "out", "o")
"""The projection that reads the output of attention."""
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead")
SIZES = ("head_dim", "attention_head_size", "head_size", "dim_head", "key_value_proj_dim")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_query_groups", "kv_heads", "n_kv_head")
QUERY_NORMS = (("q_norm", "k_norm"), ("norm_q", "norm_k"), ("q_layernorm", "k_layernorm"), ("query_norm", "key_norm"))
_NOTHING = (lambda: None).__code__
_ROTARY = re.compile(r"rotary|rope|rot_emb|freqs_cis|inv_freq", re.IGNORECASE)
_ROTATES = re.compile(r"^(apply_(multimodal_)?(rotary|rope|rot_emb)|rotate_(half|every_two))", re.IGNORECASE)


def scale_of(owner: nn.Module, size: int) -> tuple[float, bool]:
    """Return the factor of the products of queries and keys of ``size`` entries, and whether the module or its class
    states it.
    """
    for name in ("scaling", "scale"):
        value = getattr(owner, name, None)
        if isinstance(value, float) and value > 0:
            return value, True
    is_standard = written_as(owner).__module__.partition(".")[0] in ("torch", "x_transformers", "litgpt")
    return float(size**-0.5), is_standard


def written_as(module: nn.Module) -> type:
    """Return the class of a module as its author wrote it, without the class that FSDP2 derives from it."""
    bases = type(module).__mro__
    return bases[1 + next((k for k, base in enumerate(bases) if base.__name__ == "FSDPModule"), -1)]


def rotates(owner: nn.Module) -> bool:
    """Return whether a module may rotate its queries and keys: it has a rotary part, or calls a rotary function.

    A doubtful case counts as yes, because a bound is reported then.
    """
    if any(_ROTARY.search(name) and getattr(owner, name, None) is not None for name in vars(owner)):
        return True
    children = (*owner.named_children(), *owner.named_buffers(recurse=False))
    if any(_ROTARY.search(name) for name, _ in children):
        return True
    bases = [cls for cls in type(owner).__mro__ if cls.__module__.partition(".")[0] != "torch"]
    methods = [inspect.unwrap(method) for cls in bases for method in vars(cls).values() if inspect.isfunction(method)]
    called = {name for method in methods for name in getattr(method, "__code__", _NOTHING).co_names}
    return any(_ROTATES.match(name) for name in called)


def has_rotary(root: nn.Module) -> bool:
    """Return whether any part of a model makes rotary embeddings, whichever of its attention modules use them."""
    if any(_ROTARY.search(type(module).__name__) for module in root.modules()):
        return True
    return any(_ROTARY.search(name.rpartition(".")[2]) for name, _ in root.named_buffers())
