"""Nodes: modules whose outputs are measured although they have no weight, such as the blocks of a transformer."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from spectral_monitor.layers.inspect_model import Layer
from spectral_monitor.layers.layout import Layout
from spectral_monitor.layers.naming import check_patterns, matches, named_modules
from spectral_monitor.measurement import NODE, LayerInfo

SHARED_BATCH = "several processes share a batch, and which rows of a module's output each has is not known"


def node_layers(
    root: nn.Module, patterns: Sequence[str], measured: Collection[str], why_not: str = ""
) -> tuple[Layer, ...]:
    """Return the modules that some patterns name, as layers that have features only.

    All signal passes through the output of a block or of the last normalization: they are the cut nodes of The Feature
    Speed Formula, Eq. 1. A module that is a measured layer by itself is left out, for its features are known.

    Args:
        patterns: fnmatch patterns on module names; ``blocks.*`` means the blocks, and not what is in them.
        measured: names of measured layers.
        why_not: why their features cannot be had; empty if they can.

    Raises:
        ValueError: a pattern that matches no module.
    """
    containers = (nn.ModuleList, nn.ModuleDict)  # which are never called
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
            module=None if why_not else module,
            no_features=why_not,
            note=f"features: {why_not}" if why_not else "",
        )
        for name, module in modules.items()
        if name not in measured and any(_names(pattern, name) for pattern in patterns)
    )


def _names(pattern: str, name: str) -> bool:
    """Return whether a pattern fits a name of as many parts, so that ``blocks.*`` means blocks and not their parts."""
    return pattern.count(".") == name.count(".") and matches([pattern], name)
