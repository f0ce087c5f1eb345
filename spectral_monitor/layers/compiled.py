"""Layers inside compiled regions: a hook there would recompile them, or never be called."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import nn

from spectral_monitor.layers.inspect_model import Anatomy, Layer, join_notes
from spectral_monitor.layers.naming import named_modules

REASON = "inside a compiled module, where a hook would force a recompilation"


def compiled_modules(root: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost compiled modules by name; the root's is empty."""
    found: dict[str, nn.Module] = {}
    inside: set[int] = set()
    for name, module in named_modules(root):
        if id(module) not in inside and _is_compiled(module):
            found[name] = module
            inside.update(id(part) for part in module.modules())
    return found


def entrances(root: nn.Module, compiled: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules whose calls are seen from outside: all that are not in the middle of a compiled region.

    Nothing is seen of a LightningModule that was compiled: its ``training_step`` is one region, with all it calls.
    """
    hidden: set[int] = set()
    for module in compiled:
        whole = bool(getattr(module, "_compiler_ctx", None))
        hidden.update(id(part) for part in module.modules() if whole or part is not module)
    return [module for module in root.modules() if id(module) not in hidden]


def without_compiled(anatomy: Anatomy, compiled: Iterable[nn.Module]) -> Anatomy:
    """Return the anatomy with no features of layers inside compiled modules, and a note that says so."""
    inside = {id(part) for module in compiled for part in module.modules()}

    def shut(layer: Layer) -> Layer:
        if layer.module is None or id(layer.module) not in inside:
            return layer
        note = join_notes(layer.note, f"features: {REASON}")
        return replace(layer, module=None, no_features=REASON, note=note)

    return replace(anatomy, layers=tuple(map(shut, anatomy.layers)), nodes=tuple(map(shut, anatomy.nodes)))


def _is_compiled(module: nn.Module) -> bool:
    """By ``torch.compile(module)``, ``module.compile()`` or a compiled ``forward``; of a LightningModule too."""
    forward = vars(module).get("forward", type(module).forward)
    return (
        getattr(module, "_orig_mod", None) is not None
        or getattr(module, "_compiled_call_impl", None) is not None
        or bool(getattr(module, "_compiler_ctx", None))
        or hasattr(forward, "_torchdynamo_orig_callable")
    )
