"""Classification of a single weight by the module that owns it and that module's place."""

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

    suffix: str  # what follows the module's name in the layer's name
    role: str = ""  # as measured
    layout: Layout | None = None  # as measured; without it the parameter is not measured, for ``reason``
    module: nn.Module | None = None  # whose calls give features
    channels_first: bool = False
    no_features: str = _NO_CALL
    note: str = ""
    reason: str = ""
    bare: bool = False  # a parameter whose use is not known; a role the user gives it does not turn it around
    unfit: bool = False  # no role makes it measurable
    doubted: bool = False  # whether the first call has to show that the module works as its weight says


ModuleSlot = tuple[nn.Module, str]
"""The module that holds another one, and under which name."""


def classify(module: nn.Module, key: str, weight: Tensor, place: ModuleSlot | None = None) -> Guess:
    """Guess role and layout of ``module.<key>``, a parameter or what is computed in its stead."""
    if reason := _unfit(weight):
        return Guess(key, reason=reason, unfit=True)
    if _is_hooked(module, key):
        return Guess(key, reason="parametrized: the weight in use is computed from it")
    shape = tuple(weight.shape)
    if isinstance(module, _NORMS):
        return Guess(key, "vector", Layout("vector", shape))
    if key == "weight" and (guess := _known_module(module, shape)):
        return _split(guess, place)
    if len(shape) == 2 and (guess := _known_key(module, key, shape)):
        return guess
    if _is_bias_of_stack(module, key, shape, place):
        return Guess(key, "vector", Layout("vector", shape))
    if known := experts_layout(module, key, shape):
        return Guess(key, "operator", known[0], note=known[1])
    if sum(size != 1 for size in shape) <= 1 and len(shape) != 2:
        return Guess(key, "vector", Layout("vector", shape))
    if len(shape) > 2 and all(size == 1 for size in shape[:-2]):
        shape = shape[-2:]
    if len(shape) == 2:
        if use := use_of(module, key, place):
            return _used(module, key, shape, use)
        if _TABLE.search(key):
            note = "bare parameter, taken for a table (tokens, d)"
            return Guess(key, "embedding", Layout("linear", shape), note=note, bare=True)
        return Guess(key, "operator", Layout("linear", shape), note="bare parameter, taken for (out, in)", bare=True)
    if len(shape) == 3 and (use := use_of(module, key, place, stack=True)) in ("linear", "transposed"):
        kind: Kind = "experts" if use == "linear" else "experts_transposed"
        each = f"multiplied as {'(out, in)' if use == 'linear' else '(in, out)'}"
        return Guess(key, "operator", Layout(kind, shape, shape[0], shape[0]), note=f"{shape[0]} matrices, {each}")
    owner = type(module).__name__
    return Guess(key, reason=f"{len(shape)}-D parameter of {owner}: which axes are inputs and outputs is not known")


def _is_bias_of_stack(module: nn.Module, key: str, shape: tuple[int, ...], place: ModuleSlot | None) -> bool:
    """Return whether a parameter is the biases of matrices one behind the other, by its shape and its name or use."""
    if not fits_stack(module, shape):
        return False
    return key.endswith("bias") or use_of(module, key, place, stack=len(shape) == 3) == "added"


def _used(module: nn.Module, key: str, shape: tuple[int, ...], use: Use) -> Guess:
    """Return a matrix that its module holds itself and uses in a way that the source of its methods shows."""
    if use == "elementwise":
        return Guess(key, "vector", Layout("vector", shape), note="multiplied entry by entry")
    if use == "table" or use == "added":
        note = "rows of it are looked up" if use == "table" else "rows of it are added"
        return Guess(key, "embedding", Layout("linear", shape), note=f"{note}: a table (tokens, d)")
    layout, note = Layout(use, shape), f"multiplied as {'(out, in)' if use == 'linear' else '(in, out)'}"
    if key == "weight" and holds_one_matrix(module):
        return Guess("", "operator", layout, module, no_features="", note=note, doubted=True)
    return Guess(key, "operator", layout, note=note)


def _unfit(weight: Tensor) -> str:
    """Return why a weight cannot be measured at all; empty if it can."""
    if isinstance(weight, UninitializedParameter):
        return "not initialised: run one batch through the model before"
    if not weight.is_floating_point():
        return f"dtype {weight.dtype} is not real floating point"
    if weight.element_size() < 2:
        return f"dtype {weight.dtype} says nothing without its scales, which are elsewhere"
    if weight.layout != torch.strided:
        return f"its layout is {weight.layout}, of which no norms are taken"
    if weight.numel() == 0:
        return "empty"
    return ""


def _is_hooked(module: nn.Module, key: str) -> bool:
    """Return whether some hook that is not known seems to compute another weight from this one."""
    base = key.rpartition("_")[0]
    return key.endswith(("_g", "_v", "_orig")) and base in dir(module) and base not in module._parameters


def _split(guess: Guess, place: ModuleSlot | None) -> Guess:
    """Return a known matrix with the blocks it is fused of, if its place suggests any."""
    layout = guess.layout
    if place is None or layout is None or guess.role != "operator" or layout.kind not in ("linear", "transposed"):
        return guess
    outputs = layout.fan_out
    split = split_of(*place, outputs, layout.fan_in)
    if split is None:
        return guess
    if not split.fits(outputs):
        note = f"its name says {split.what}, but how its {outputs} outputs are shared out is not known: one block"
        return replace(guess, note="; ".join(filter(None, (note, guess.note))))
    sizes = split.sizes if len(set(split.sizes)) > 1 else ()
    layout = replace(layout, blocks=len(split.sizes), sizes=sizes, repeats=split.repeats)
    return replace(guess, layout=layout, note="; ".join(filter(None, (split.note, guess.note))))


def _known_module(module: nn.Module, shape: tuple[int, ...]) -> Guess | None:
    """Modules whose ``weight`` is their matrix: the layer is named after the module."""
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
        if is_a(module, "NonDynamicallyQuantizableLinear"):
            why = "MultiheadAttention uses the weight without calling the module"
            return Guess("", "operator", Layout("linear", shape), no_features=why)
        return Guess("", "operator", Layout("linear", shape), module, no_features="")
    # Hugging Face's Conv1D, a Linear with a transposed weight; known by name so that transformers is not imported.
    if is_a(module, "Conv1D") and hasattr(module, "nf") and len(shape) == 2:
        return Guess("", "operator", Layout("transposed", shape), module, no_features="")
    if isinstance(module, InputsFirst):
        return Guess("", "operator", Layout("transposed", shape), module, no_features="", note=module.reason)
    alike = linear_layout(module, shape)
    return None if alike is None else Guess("", "operator", alike, module, no_features="", doubted=True)


def _reads_patches(module: nn.Module) -> bool:
    """Return whether a convolution reads each input once, so that it is one matrix that maps patches to outputs."""
    return (
        isinstance(module, _CONV)
        and module.stride == module.kernel_size
        and set(module.dilation) == {1}
        and (module.padding == "valid" or set(module.padding) == {0})
        and module.groups == 1
    )


def _known_key(module: nn.Module, key: str, shape: tuple[int, ...]) -> Guess | None:
    """Matrices that modules hold under names of their own."""
    if isinstance(module, nn.MultiheadAttention) and key.endswith("_proj_weight"):
        blocks = 3 if key == "in_proj_weight" else 1
        note = f"{ATTENTION}, 3 blocks" if blocks == 3 else ""
        return Guess(key.removesuffix("_weight"), "operator", Layout("linear", shape, blocks), note=note)
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)) and key.startswith("weight_"):
        kinds = (gates for name, gates in _GATES.items() if is_a(module, name) or is_a(module, f"{name}Cell"))
        gates = next(kinds, 1) if not key.startswith("weight_hr") else 1
        note = f"{gates} gates" if gates > 1 else ""
        return Guess(key, "operator", Layout("linear", shape, gates), note=note)
    return None


def cast_layout(name: str, shape: tuple[int, ...], guess: Guess, role: str) -> Layout:
    """Return the layout under an overriding role (an embedding's rows are tokens; an operator's are outputs)."""
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
