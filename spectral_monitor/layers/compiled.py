"""Layers inside compiled regions: a hook there would force a recompilation, or never be called."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import nn

from spectral_monitor.layers.inspect_model import Anatomy, Layer
from spectral_monitor.layers.naming import named_modules

REASON = "inside a compiled module, where a hook would force a recompilation"


def compiled_modules(root: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost compiled modules by name; the root's is empty."""
    outermost: dict[str, nn.Module] = {}
    inside: set[int] = set()
    for name, module in named_modules(root):
        if id(module) not in inside and _is_compiled(module):
            outermost[name] = module
            inside.update(id(part) for part in module.modules())
    return outermost


def entrances(root: nn.Module, compiled: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules whose calls hooks can see: those outside compiled regions, and those that are one.

    No call of a compiled LightningModule can be seen: its ``training_step`` and everything it calls are one region.
    """
    hidden: set[int] = set()
    for module in compiled:
        is_lightning = bool(getattr(module, "_compiler_ctx", None))
        hidden.update(id(part) for part in module.modules() if is_lightning or part is not module)
    return [module for module in root.modules() if id(module) not in hidden]


def without_compiled(anatomy: Anatomy, compiled: Iterable[nn.Module]) -> Anatomy:
    """Return the anatomy without the features of layers inside compiled modules, and with a note that says so."""
    inside = {id(part) for module in compiled for part in module.modules()}

    def strip(layer: Layer) -> Layer:
        if layer.module is None or id(layer.module) not in inside:
            return layer
        return replace(layer, module=None, no_features=REASON)

    return replace(anatomy, layers=tuple(map(strip, anatomy.layers)), nodes=tuple(map(strip, anatomy.nodes)))


def _is_compiled(module: nn.Module) -> bool:
    """Return whether ``torch.compile`` was applied to a module, its ``forward`` or a LightningModule."""
    forward = vars(module).get("forward", type(module).forward)
    return (
        getattr(module, "_orig_mod", None) is not None
        or getattr(module, "_compiled_call_impl", None) is not None
        or bool(getattr(module, "_compiler_ctx", None))
        or hasattr(forward, "_torchdynamo_orig_callable")
    )
