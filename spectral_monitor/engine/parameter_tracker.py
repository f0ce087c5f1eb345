"""Tracking of parameters: those that are pruned, parametrized or replaced during training have moved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from spectral_monitor.layers.inspect_model import Layer
from spectral_monitor.layers.naming import named_modules
from spectral_monitor.state.dtensor import is_distributed


class ParameterTracker:
    """The places of the layers' parameters in a model, at first and now.

    Parameters that are spread over processes are not followed, for whoever spreads them puts others in their place.
    """

    def __init__(self, root: nn.Module, layers: Sequence[Layer]) -> None:
        self._root, self._layers = root, layers
        self._first = _places(root)

    def moved(self) -> set[int]:
        """Layers whose weight comes from somewhere else by now."""
        now = _places(self._root)
        sources = ((i, p) for i, layer in enumerate(self._layers) for p in layer.sources if not is_distributed(p))
        return {i for i, p in sources if not self._first[id(p)] <= now[id(p)]}


def _places(root: nn.Module) -> defaultdict[int, set[tuple[str, ...]]]:
    """Parameter's id -> for each place the module, the name in it, and what a parametrization makes of it."""
    found: defaultdict[int, set[tuple[str, ...]]] = defaultdict(set)
    for owner, module in named_modules(root):
        steps = [type(step).__qualname__ for step in module] if isinstance(module, ParametrizationList) else []
        for key, parameter in module._parameters.items():
            if parameter is not None:
                found[id(parameter)].add((owner, key, *steps))
    return found
