"""Weights without the model's code: read from a file, and put into modules that suit their names and shapes."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spectral_monitor.layers.recognition.linear_lookalikes import InputsFirst

_WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "weights")
"""Keys under which a checkpoint keeps the weights."""
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
_EMBEDDING_NAME = re.compile(r"emb|wte|wpe|token|codebook", re.IGNORECASE)
_CONVOLUTIONS: dict[int, Any] = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}
WHAT_TO_GIVE = "give a Lightning checkpoint, a state_dict saved with torch.save, or .safetensors"


def weights_in(path: Path) -> dict[str, Tensor]:
    """Return the weights in a file by name, without executing code in it.

    Raises:
        ValueError: the file is not a checkpoint, or holds more than tensors and plain values.
        OSError: the file cannot be read.
        ImportError: safetensors is not installed.
    """
    if path.is_dir():
        raise ValueError(f"{str(path)!r} is a folder; {WHAT_TO_GIVE}")
    if not path.exists():
        raise FileNotFoundError(f"there is no file {str(path)!r}; {WHAT_TO_GIVE}")
    if path.suffix == ".safetensors":
        return _safetensors(path)
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if "weights_only" in str(error) or "Unsupported" in str(error):
            raise ValueError(
                f"{str(path)!r} holds more than tensors and plain values, or is not a checkpoint: if you trust it, "
                "load it yourself and call spectral_monitor.inspect(state_dict)"
            ) from error
        raise ValueError(f"{str(path)!r} is not a checkpoint; {WHAT_TO_GIVE}") from error
    except OSError:
        raise
    except Exception as error:  # bytes that are no pickle make an unpickler raise anything
        raise ValueError(f"{str(path)!r} is not a checkpoint, or was cut short; {WHAT_TO_GIVE}") from error
    weights = _tensors(checkpoint)
    if not weights:
        raise ValueError(f"no weights in {str(path)!r}; {WHAT_TO_GIVE}")
    return weights


def _safetensors(path: Path) -> dict[str, Tensor]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError:
        raise ImportError("a .safetensors file needs safetensors: pip install safetensors") from None
    try:
        return dict(load_file(path))
    except SafetensorError as error:
        raise ValueError(f"{str(path)!r} is not a checkpoint, or was cut short; {WHAT_TO_GIVE}") from error


def _tensors(checkpoint: Any) -> dict[str, Tensor]:
    """Return the tensors of a state_dict, however deeply a checkpoint wraps it."""
    if not isinstance(checkpoint, Mapping):
        return {}
    for key in _WRAPPERS:
        if tensors := _tensors(checkpoint.get(key)):
            return tensors
    return {str(name): value for name, value in checkpoint.items() if isinstance(value, Tensor)}


def skeleton(weights: Mapping[str, Tensor], source: str) -> nn.Module:
    """Return modules that hold the weights, of kinds that suit names and shapes; nothing is copied.

    A matrix is (out, in), unless biases show that its inputs come first. ``source``: where they are from, for an error.

    Raises:
        ValueError: there is no floating-point tensor among them.

    Example:
        >>> model = skeleton({"emb.weight": torch.zeros(9, 4), "h.0.fc.weight": torch.zeros(8, 4)}, "here")
        >>> [(name, type(module).__name__) for name, module in model.named_modules() if "." not in name or "fc" in name]
        [('', 'Module'), ('emb', 'Embedding'), ('h', 'Module'), ('h.0.fc', 'Linear')]
    """
    # torch.compile and DistributedDataParallel add to names.
    tensors = {name.replace("_orig_mod.", ""): value for name, value in weights.items() if isinstance(value, Tensor)}
    if tensors and all(name.startswith("module.") for name in tensors):
        tensors = {name.removeprefix("module."): value for name, value in tensors.items()}
    parameters = {
        name: value
        for name, value in tensors.items()
        if value.is_floating_point() and name.rpartition(".")[2] not in _BUFFERS
    }
    if not parameters:
        raise ValueError(f"no floating-point weights in {source}; {WHAT_TO_GIVE}")
    root, transposed = nn.Module(), _inputs_first(parameters)
    shared: dict[tuple[Any, ...], nn.Parameter] = {}
    for name, value in parameters.items():
        *path, key = name.split(".")
        parent = root
        for depth, part in enumerate(path):
            child = parent._modules.get(part)
            if child is None:
                leaf, owner = depth == len(path) - 1, ".".join(path)
                child = (
                    _module(owner, parameters.get(f"{owner}.weight"), transposed.get(owner)) if leaf else nn.Module()
                )
                parent.add_module(part, child)
            parent = child
        memory = (value.data_ptr(), tuple(value.shape), value.stride(), value.device, value.dtype)
        tied = shared.get(memory) if value.numel() and not value.is_meta else None  # tied weights stay tied
        parent._parameters[key] = shared[memory] = nn.Parameter(value.detach()) if tied is None else tied
    return root


def _inputs_first(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the modules whose matrix is (in, out), as in Hugging Face's GPT-2, with the reason.

    1. A bias is as long as the outputs, so that it shows which side of a matrix that is not square they are.
    2. A square matrix with a bias is like the others in its parent, in all blocks, if these agree.
    3. A matrix without a bias is (out, in).
    """
    inputs_first: dict[str, bool] = {}  # module -> whether its bias shows that inputs come first
    square: list[str] = []
    for name, weight in weights.items():
        owner, _, key = name.rpartition(".")
        bias = weights.get(f"{owner}.bias")
        if key != "weight" or weight.ndim != 2 or bias is None or bias.ndim != 1 or _is_embedding(owner):
            continue
        rows, columns = weight.shape
        if rows == columns == len(bias):
            square.append(owner)
        elif len(bias) in (rows, columns):
            inputs_first[owner] = len(bias) == columns
    siblings: dict[str, set[bool]] = {}
    for owner, first in inputs_first.items():
        siblings.setdefault(_parent(owner), set()).add(first)
    of_siblings = [owner for owner in square if siblings.get(_parent(owner)) == {True}]
    return {
        **{owner: "inputs first, judging by its bias" for owner, first in inputs_first.items() if first},
        **dict.fromkeys(of_siblings, "inputs first, judging by neighbouring biases"),
    }


def _parent(owner: str) -> str:
    """Return the module that holds another one, without the numbers of blocks.

    Example:
        >>> _parent("transformer.h.11.attn.c_proj")
        'transformer.h.attn'
    """
    return ".".join(part for part in owner.split(".")[:-1] if not part.isdecimal())


def _is_embedding(owner: str) -> bool:
    """Return whether a module's name is that of an embedding."""
    return _EMBEDDING_NAME.search(owner.rpartition(".")[2]) is not None


def _module(owner: str, weight: Tensor | None, transposed: str | None) -> nn.Module:
    """Return a module without parameters, of the kind that a weight looks like.

    ``transposed``: the reason why the weight is (in, out); ``None`` where it is (out, in).
    """
    module: nn.Module | None = None
    with torch.device("meta"):
        if transposed is not None:
            module = InputsFirst(transposed)
        elif weight is not None and weight.ndim == 2 and _is_embedding(owner):
            module = nn.Embedding(*weight.shape)
        elif weight is not None and weight.ndim == 2:
            module = nn.Linear(weight.shape[1], weight.shape[0])
        elif weight is not None and weight.ndim in _CONVOLUTIONS:
            module = _CONVOLUTIONS[weight.ndim](weight.shape[1], weight.shape[0], tuple(weight.shape[2:]))
    if module is None:
        return nn.Module()
    module._parameters.clear()
    return module
