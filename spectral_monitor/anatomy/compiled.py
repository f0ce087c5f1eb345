"""Layers inside compiled regions: a hook there would recompile them, or never be called."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from spectral_monitor.anatomy.find import Anatomy, Layer, join_notes

REASON = "inside a compiled module, where a hook would force a recompilation"


def compiled_names(root: nn.Module) -> list[str]:
    """Names of the outermost compiled modules; the root's is empty."""
    names: list[str] = []
    for name, module in root.named_modules():
        if _is_compiled(module) and not any(name == outer or name.startswith(f"{outer}.") for outer in names):
            names.append(name)
            if not name:
                break
    return names


def without_compiled(root: nn.Module, anatomy: Anatomy) -> Anatomy:
    """The anatomy with no features of layers inside compiled modules, and a note that says so."""
    modules = dict(root.named_modules(remove_duplicate=False))
    inside = {id(part) for name in compiled_names(root) for part in modules[name].modules()}

    def shut(layer: Layer) -> Layer:
        if layer.module is None or id(layer.module) not in inside:
            return layer
        note = join_notes(layer.note, f"features: {REASON}")
        return replace(layer, module=None, no_features=REASON, note=note)

    return replace(anatomy, layers=tuple(map(shut, anatomy.layers)))


def _is_compiled(module: nn.Module) -> bool:
    """By ``torch.compile(module)``, ``module.compile()`` or a compiled ``forward``; of a LightningModule too."""
    forward = vars(module).get("forward", type(module).forward)
    return (
        getattr(module, "_orig_mod", None) is not None
        or getattr(module, "_compiled_call_impl", None) is not None
        or bool(getattr(module, "_compiler_ctx", None))
        or hasattr(forward, "_torchdynamo_orig_callable")
    )
