"""Nodes: modules without a weight whose outputs are measured, such as the blocks of a transformer."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from spectral_monitor.layers.inspect_model import Layer
from spectral_monitor.layers.layout import Layout
from spectral_monitor.layers.naming import check_patterns, matches, named_modules
from spectral_monitor.measurement import NODE, LayerInfo

SHARED_BATCH = "several processes share a batch, and it is not known which rows of a module's output each has"


def node_layers(
    root: nn.Module, patterns: Sequence[str], measured: Collection[str], no_features: str = ""
) -> tuple[Layer, ...]:
    """Return the modules that match some patterns, as layers that have only features.

    All signals pass through the output of a block or of the last normalization: these are the cut nodes of The Feature
    Speed Formula, Eq. 1. A module that is itself a measured layer is left out, because its features are known.

    Args:
        patterns: fnmatch patterns on module names; ``blocks.*`` means the blocks, not the modules inside them.
        measured: names of measured layers.
        no_features: the reason why features cannot be measured; empty if they can.

    Raises:
        ValueError: a pattern matches no module.
    """
    containers = (nn.ModuleList, nn.ModuleDict)  # they are never called
    modules = {name: module for name, module in named_modules(root) if name and not isinstance(module, containers)}
    for pattern in patterns:
        if not any(_names(pattern, name) for name in modules):
            others = [name for name in modules if not matches([pattern], name)]
            check_patterns("nodes", [pattern], others or ["none"], "module")
    return tuple(
        Layer(
            info=LayerInfo(name, NODE, 1, 1, ()),
            sources=(),
            layout=Layout("vector", ()),
            module=None if no_features else module,
            no_features=no_features,
        )
        for name, module in modules.items()
        if name not in measured and any(_names(pattern, name) for pattern in patterns)
    )


def _names(pattern: str, name: str) -> bool:
    """Return whether a name matches a pattern and has as many parts: ``blocks.*`` does not match ``blocks.0.attn``."""
    return pattern.count(".") == name.count(".") and matches([pattern], name)
