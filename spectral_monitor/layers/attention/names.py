"""Names that attention modules give to their parts, so that no library has to be imported to know them."""

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
"""Projections of queries, keys and values, one module each."""
FUSED = ("qkv", "Wqkv", "qkv_proj", "c_attn", "query_key_value", "to_qkv", "attn")
"""One projection for all three."""
OUTPUTS = ("o_proj", "out_proj", "c_proj", "proj", "to_out", "dense", "out_lin", "wo", "Wo", "out", "o")
"""The projection that reads what attention returns."""
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead")
SIZES = ("head_dim", "attention_head_size", "head_size", "dim_head", "key_value_proj_dim")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_query_groups", "kv_heads", "n_kv_head")
QUERY_NORMS = (("q_norm", "k_norm"), ("norm_q", "norm_k"), ("q_layernorm", "k_layernorm"), ("query_norm", "key_norm"))
_NOTHING = (lambda: None).__code__
_ROTARY = re.compile(r"rotary|rope|rot_emb|freqs_cis|inv_freq", re.IGNORECASE)
_ROTATES = re.compile(r"^(apply_(multimodal_)?(rotary|rope|rot_emb)|rotate_(half|every_two))", re.IGNORECASE)


def scale_of(owner: nn.Module, size: int) -> tuple[float, bool]:
    """Return what a module multiplies the products of queries and keys of ``size`` entries with, and whether it or its
    class says so.
    """
    for name in ("scaling", "scale"):
        value = getattr(owner, name, None)
        if isinstance(value, float) and value > 0:
            return value, True
    known = written_as(owner).__module__.partition(".")[0] in ("torch", "x_transformers", "litgpt")
    return float(size**-0.5), known


def written_as(module: nn.Module) -> type:
    """Return the class of a module as its author wrote it: FSDP2 puts one of its own before that."""
    kinds = type(module).__mro__
    return kinds[1 + next((k for k, kind in enumerate(kinds) if kind.__name__ == "FSDPModule"), -1)]


def rotates(owner: nn.Module) -> bool:
    """Return whether a module may rotate its queries and keys: it has such a part, or calls such a function.

    Where it is in doubt the answer is yes, for then a bound is reported.
    """
    if any(_ROTARY.search(name) and getattr(owner, name, None) is not None for name in vars(owner)):
        return True
    children = (*owner.named_children(), *owner.named_buffers(recurse=False))
    if any(_ROTARY.search(name) for name, _ in children):
        return True
    own = [cls for cls in type(owner).__mro__ if cls.__module__.partition(".")[0] != "torch"]
    methods = [inspect.unwrap(method) for cls in own for method in vars(cls).values() if inspect.isfunction(method)]
    called = {name for method in methods for name in getattr(method, "__code__", _NOTHING).co_names}
    return any(_ROTATES.match(name) for name in called)


def has_rotary(root: nn.Module) -> bool:
    """Return whether a part of a model makes rotary embeddings, for whichever of its attention modules."""
    if any(_ROTARY.search(type(module).__name__) for module in root.modules()):
        return True
    return any(_ROTARY.search(name.rpartition(".")[2]) for name, _ in root.named_buffers())
