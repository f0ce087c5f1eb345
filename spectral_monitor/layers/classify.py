"""Classification of a single weight by the module that owns it and by that module's parent."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from spectral_monitor.layers.fused import ATTENTION, is_a, split_of
from spectral_monitor.layers.layout import Kind, Layout
from spectral_monitor.layers.recognition.bare_parameters import Use, use_of
from spectral_monitor.layers.recognition.experts import experts_layout, fits_stack
from spectral_monitor.layers.recognition.linear_lookalikes import InputsFirst, holds_one_matrix, linear_layout
from spectral_monitor.measurement import DENSE

_CONV = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_CONV_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NORMS = (nn.LayerNorm, nn.RMSNorm)
"""Modules whose parameters are gains and biases of any shape."""
_GATES = {"LSTM": 4, "GRU": 3}
_TABLE = re.compile(r"emb|pos|token|codebook|quer", re.IGNORECASE)
_NO_CALL = "no module call to hook"


@dataclass(frozen=True)
class Guess:
    """A guess at what a parameter is."""

    suffix: str  # follows the module's name in the layer's name
    role: str = ""
    layout: Layout | None = None  # ``None`` if the parameter is not measured, for ``reason``
    module: nn.Module | None = None  # its calls give features
    channels_first: bool = False
    no_features: str = _NO_CALL
    note: str = ""
    reason: str = ""
    bare: bool = False  # a parameter whose use is not known; a role that the user gives it does not transpose it
    unfit: bool = False  # no role makes it measurable
    unverified: bool = False  # whether the first call must show that the outputs are inputs times weight


ModuleSlot = tuple[nn.Module, str]
"""The parent of a module, and the module's name there."""


def classify(module: nn.Module, key: str, weight: Tensor, slot: ModuleSlot | None = None) -> Guess:
    """Guess role and layout of ``module.<key>``: a parameter, or the weight computed in its place."""
    if reason := _unfit(weight):
        return Guess(key, reason=reason, unfit=True)
    if _is_hooked(module, key):
        return Guess(key, reason="parametrized: the weight in use is computed from it")
    shape = tuple(weight.shape)
    if isinstance(module, _NORMS):
        return Guess(key, "vector", Layout("vector", shape))
    if key == "weight" and (guess := _known_module(module, shape)):
        return _split(guess, slot)
    if len(shape) == 2 and (guess := _known_key(module, key, shape)):
        return guess
    if _is_bias_of_stack(module, key, shape, slot):
        return Guess(key, "vector", Layout("vector", shape))
    if experts := experts_layout(module, key, shape):
        layout, note = experts
        return Guess(key, "operator", layout, note=note)
    if sum(size != 1 for size in shape) <= 1 and len(shape) != 2:
        return Guess(key, "vector", Layout("vector", shape))
    if len(shape) > 2 and all(size == 1 for size in shape[:-2]):
        shape = shape[-2:]
    if len(shape) == 2:
        if use := use_of(module, key, slot):
            return _used(module, key, shape, use)
        if _TABLE.search(key):
            note = "bare parameter, taken for a table (tokens, d)"
            return Guess(key, "embedding", Layout("linear", shape), note=note, bare=True)
        return Guess(key, "operator", Layout("linear", shape), note="bare parameter, taken for (out, in)", bare=True)
    if len(shape) == 3 and (use := use_of(module, key, slot, stack=True)) in ("linear", "transposed"):
        kind: Kind = "experts" if use == "linear" else "experts_transposed"
        note = f"{shape[0]} matrices, {_multiplied(use)}"
        return Guess(key, "operator", Layout(kind, shape, shape[0], shape[0]), note=note)
    owner = type(module).__name__
    return Guess(key, reason=f"{len(shape)}-D parameter of {owner}: it is not known which axes are inputs and outputs")


def _is_bias_of_stack(module: nn.Module, key: str, shape: tuple[int, ...], slot: ModuleSlot | None) -> bool:
    """Return whether a parameter is the biases of a stack of matrices, by its shape and by its name or use."""
    if not fits_stack(module, shape):
        return False
    return key.endswith("bias") or use_of(module, key, slot, stack=len(shape) == 3) == "added"


def _multiplied(use: Use) -> str:
    return f"multiplied as {'(out, in)' if use == 'linear' else '(in, out)'}"


def _used(module: nn.Module, key: str, shape: tuple[int, ...], use: Use) -> Guess:
    """Return the guess for a bare matrix whose use is known from the source of its module."""
    if use == "elementwise":
        return Guess(key, "vector", Layout("vector", shape), note="used entry by entry")
    if use == "table" or use == "added":
        note = "rows of it are looked up" if use == "table" else "rows of it are added"
        return Guess(key, "embedding", Layout("linear", shape), note=f"{note}: a table (tokens, d)")
    layout, note = Layout(use, shape), _multiplied(use)
    if key == "weight" and holds_one_matrix(module):
        return Guess("", "operator", layout, module, no_features="", note=note, unverified=True)
    return Guess(key, "operator", layout, note=note)


def _unfit(weight: Tensor) -> str:
    """Return the reason why a weight cannot be measured in any role; empty if it can."""
    if isinstance(weight, UninitializedParameter):
        return "not initialized: run one batch through the model first"
    if not weight.is_floating_point():
        return f"dtype {weight.dtype} is not real floating point"
    if weight.element_size() < 2:
        return f"dtype {weight.dtype} has no meaning without its scales, which are stored elsewhere"
    if weight.layout != torch.strided:
        return f"norms of layout {weight.layout} are not supported"
    if weight.numel() == 0:
        return "empty"
    return ""


def _is_hooked(module: nn.Module, key: str) -> bool:
    """Return whether an unknown hook seems to compute another weight from this one."""
    base = key.rpartition("_")[0]
    return key.endswith(("_g", "_v", "_orig")) and base in dir(module) and base not in module._parameters


def _split(guess: Guess, slot: ModuleSlot | None) -> Guess:
    """Return a known matrix with its fused blocks, if its parent and its name there suggest any."""
    layout = guess.layout
    if slot is None or layout is None or guess.role != "operator" or layout.kind not in ("linear", "transposed"):
        return guess
    outputs = layout.fan_out
    split = split_of(*slot, outputs, layout.fan_in)
    if split is None:
        return guess
    if not split.fits(outputs):
        unknown = f"the blocks of its {outputs} outputs are not known"
        note = f"its name says {split.block_names}, but {unknown}: one block"
        return replace(guess, note="; ".join(filter(None, (note, guess.note))))
    sizes = split.sizes if len(set(split.sizes)) > 1 else ()
    layout = replace(layout, blocks=len(split.sizes), sizes=sizes, repeats=split.repeats)
    return replace(guess, layout=layout, note="; ".join(filter(None, (split.note, guess.note))))


def _known_module(module: nn.Module, shape: tuple[int, ...]) -> Guess | None:
    """Return the guess for the ``weight`` of a known class of modules: the layer is named after the module."""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return Guess("", "embedding", Layout("linear", shape), module, no_features="")
    if isinstance(module, (*_CONV, *_CONV_TRANSPOSED)):
        kind: Kind = "conv" if isinstance(module, _CONV) else "conv_transposed"
        layout = Layout(kind, shape, blocks=module.groups, groups=module.groups)
        note = f"{layout.taps} taps, norms added up" if layout.taps > 1 else ""
        if layout.taps > 1 and _reads_patches(module):
            note = f"patches of {layout.taps} taps, one matrix"
            layout = Layout("patches", shape)
        return Guess("", "operator", layout, module, channels_first=True, no_features="", note=note)
    if isinstance(module, nn.Linear) and len(shape) == 2:
        if is_a(module, "NonDynamicallyQuantizableLinear"):  # MultiheadAttention uses its weight without a call
            return Guess("", "operator", Layout("linear", shape))
        return Guess("", "operator", Layout("linear", shape), module, no_features="")
    # Hugging Face's Conv1D, a Linear with a transposed weight; recognized by name, without importing transformers.
    if is_a(module, "Conv1D") and hasattr(module, "nf") and len(shape) == 2:
        return Guess("", "operator", Layout("transposed", shape), module, no_features="")
    if isinstance(module, InputsFirst):
        return Guess("", "operator", Layout("transposed", shape), module, no_features="", note=module.reason)
    linear = linear_layout(module, shape)
    return None if linear is None else Guess("", "operator", linear, module, no_features="", unverified=True)


def _reads_patches(module: nn.Module) -> bool:
    """Return whether a convolution reads each input once, so that it is one matrix from patches to outputs."""
    return (
        isinstance(module, _CONV)
        and module.stride == module.kernel_size
        and set(module.dilation) == {1}
        and (module.padding == "valid" or set(module.padding) == {0})
        and module.groups == 1
    )


def _known_key(module: nn.Module, key: str, shape: tuple[int, ...]) -> Guess | None:
    """Return the guess for a matrix of torch's attention or recurrent modules, which have names of their own."""
    if isinstance(module, nn.MultiheadAttention) and key.endswith("_proj_weight"):
        blocks = 3 if key == "in_proj_weight" else 1
        note = ATTENTION if blocks == 3 else ""
        return Guess(key.removesuffix("_weight"), "operator", Layout("linear", shape, blocks), note=note)
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)) and key.startswith("weight_"):
        kinds = (gates for name, gates in _GATES.items() if is_a(module, name) or is_a(module, f"{name}Cell"))
        gates = next(kinds, 1) if not key.startswith("weight_hr") else 1
        note = f"{gates} gates" if gates > 1 else ""
        return Guess(key, "operator", Layout("linear", shape, gates), note=note)
    return None


def cast_layout(name: str, shape: tuple[int, ...], guess: Guess, role: str) -> Layout:
    """Return the layout under the user's role: the rows of an embedding are tokens, those of an operator outputs."""
    if role == "vector":
        return Layout("vector", shape)
    layout = guess.layout
    if layout is None or (role and layout.kind == "vector"):
        raise ValueError(f"roles: {name!r} of shape {shape} cannot be {role!r}; choose vector or ignore")
    if guess.bare:
        return layout
    if role == "embedding" and guess.role != "embedding":
        if guess.channels_first or layout.blocks > 1:
            raise ValueError(f"roles: {name!r} of shape {shape} cannot be 'embedding': it is not a table (tokens, d)")
        return Layout("linear" if layout.kind == "transposed" else "transposed", shape)
    if role in DENSE and guess.role == "embedding":
        return Layout("transposed", shape)  # a table (tokens, d) seen as a map from tokens to d
    return layout
