"""Weights in use that are computed from what is trained: parametrizations, and the hooks there were before them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from spectral_monitor.state.rng import RandomState
from spectral_monitor.state.snapshot import Snapshot


@dataclass(frozen=True)
class Computed:
    """A weight that is computed."""

    sources: tuple[nn.Parameter, ...]  # the parameters it is computed from
    weight: Callable[[], Tensor]  # computes it as the last forward did, without a trace
    modules: tuple[nn.Module, ...] = ()  # those that are there for nothing else


def computed_weights(module: nn.Module) -> dict[str, Computed]:
    """Name in ``module`` -> weight, for those computed from at least one parameter."""
    found: dict[str, Computed] = {}
    if is_parametrized(module):
        assert isinstance(module.parametrizations, nn.ModuleDict)
        for key, made in module.parametrizations.items():
            assert isinstance(made, ParametrizationList)
            found[key] = Computed(tuple(made.parameters()), partial(_parametrized, made), tuple(made.modules()))
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm):
            sources, compute = ("_g", "_v"), partial(hook.compute_weight, module)
            found[hook.name] = _hooked(module, hook.name, sources, compute)
        elif isinstance(hook, SpectralNorm):
            compute = partial(hook.compute_weight, module, do_power_iteration=False)
            found[hook.name] = _hooked(module, hook.name, ("_orig",), compute)
        elif isinstance(hook, BasePruningMethod):
            name = hook._tensor_name
            found[name] = _hooked(module, name, ("_orig",), partial(hook.apply_mask, module))
    return {key: computed for key, computed in found.items() if computed.sources}


def _hooked(module: nn.Module, name: str, suffixes: tuple[str, ...], compute: Callable[[], Tensor]) -> Computed:
    held = (module._parameters.get(name + suffix) for suffix in suffixes)
    return Computed(tuple(p for p in held if p is not None), compute)


def _parametrized(made: ParametrizationList) -> Tensor:
    """Return the weight as in evaluation: power iterations wait for the next forward, and nothing random is added."""
    with RandomState.now().replayed():
        state = Snapshot(made, weights=False)
        try:
            for part in made.modules():
                part.training = False
            with torch.no_grad():
                weight: Tensor = made()
                return weight
        finally:
            state.restore()
