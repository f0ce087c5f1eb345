"""Weights that are computed from trained parameters: by parametrizations, or by the older hooks."""

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

    sources: tuple[nn.Parameter, ...]
    weight: Callable[[], Tensor]  # computes it as the last forward did, without side effects
    modules: tuple[nn.Module, ...] = ()  # modules whose only purpose is to compute it


def computed_weights(module: nn.Module) -> dict[str, Computed]:
    """Return name in ``module`` -> weight, for each weight that is computed from at least one parameter."""
    weights: dict[str, Computed] = {}
    if is_parametrized(module):
        assert isinstance(module.parametrizations, nn.ModuleDict)
        for name, steps in module.parametrizations.items():
            assert isinstance(steps, ParametrizationList)
            weights[name] = Computed(tuple(steps.parameters()), partial(_parametrized, steps), tuple(steps.modules()))
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm):
            sources, compute = ("_g", "_v"), partial(hook.compute_weight, module)
            weights[hook.name] = _hooked(module, hook.name, sources, compute)
        elif isinstance(hook, SpectralNorm):
            compute = partial(hook.compute_weight, module, do_power_iteration=False)
            weights[hook.name] = _hooked(module, hook.name, ("_orig",), compute)
        elif isinstance(hook, BasePruningMethod):
            name = hook._tensor_name
            weights[name] = _hooked(module, name, ("_orig",), partial(hook.apply_mask, module))
    return {name: weight for name, weight in weights.items() if weight.sources}


def _hooked(module: nn.Module, name: str, suffixes: tuple[str, ...], compute: Callable[[], Tensor]) -> Computed:
    sources = (module._parameters.get(name + suffix) for suffix in suffixes)
    return Computed(tuple(p for p in sources if p is not None), compute)


def _parametrized(steps: ParametrizationList) -> Tensor:
    """Return the weight as in evaluation mode: without power iterations and without randomness."""
    with RandomState.now().replayed():
        state = Snapshot(steps, weights=False)
        try:
            for part in steps.modules():
                part.training = False
            with torch.no_grad():
                weight: Tensor = steps()
                return weight
        finally:
            state.restore()
