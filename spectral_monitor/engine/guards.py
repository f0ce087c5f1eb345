"""Guards of the measurement: unsupported optimizers are refused, errors cost one step, norms have full precision."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim import LBFGS, Optimizer

from spectral_monitor.engine.results.reasons import REPLACED
from spectral_monitor.layers import Layer
from spectral_monitor.layers.naming import named_modules
from spectral_monitor.messages import WarnOnce, joined
from spectral_monitor.quantities import TIERS
from spectral_monitor.state.dtensor import is_distributed

MAX_NAMES = 5
"""Layers that a warning names."""
Locations = Mapping[nn.Parameter, set[tuple[str, ...]]]
"""Parameter -> for each of its locations the module, the name in it, and the steps of a parametrization."""
LESS_MEMORY = " (low_memory=True, quantities='light' and replay_samples=2 each take less memory)"
NEW_LIST = "A new fit or a new probe measures them"
"""Advice to list the layers again."""


class FailureGuard:
    """Keeps errors of the code inside ``with guard(task):`` from the training step, and counts the time it takes.

    Attributes:
        failed: whether there was an error in the watched step, which is then not measured.
        spent: seconds.
    """

    def __init__(self, warn: WarnOnce) -> None:
        """``warn``: called with the first error of a step, of which the others are consequences."""
        self._warn = warn
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self.failed, self.spent = False, 0.0

    @contextmanager
    def __call__(self, task: str) -> Iterator[None]:
        """Turn any error inside into a warning that ``task`` has failed."""
        begin, spent = time.perf_counter(), self.spent
        try:
            yield
        except Exception as error:
            first, self.failed = not self.failed, True
            if first:
                advice = LESS_MEMORY if isinstance(error, torch.OutOfMemoryError) else ""
                message = f"a step was not measured: {task} failed with {type(error).__name__}: {error}"
                self._warn(message + advice, error)
        finally:
            self.spent = spent + time.perf_counter() - begin  # replaces what nested guards have added


def check_supported(optimizers: Sequence[Optimizer]) -> None:
    """Raise ValueError for an optimizer with which features cannot be measured, naming what can be."""
    light = f"Choose quantities='light', or a list of {', '.join(TIERS['light'])}"
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS):
            raise ValueError(f"{type(optimizer).__name__} runs the forward several times in a step. {light}")


class ParameterTracker:
    """The locations of the layers' parameters in a model, at first and now.

    Distributed parameters are not tracked, because sharding replaces them.
    """

    def __init__(self, root: nn.Module, layers: Sequence[Layer]) -> None:
        self._root, self._layers = root, layers
        self._first = _locations(root)

    def moved(self, warn: Callable[[str], None]) -> set[int]:
        """Return the layers whose weight has been replaced; warn of these and of new layers."""
        now = _locations(self._root)
        sources = ((i, p) for i, layer in enumerate(self._layers) for p in layer.sources if not is_distributed(p))
        moved = {i for i, p in sources if not self._first[p] <= now[p]}
        if moved:
            names = [self._layers[i].info.name for i in sorted(moved)]
            warn(f"not measured any more: {joined(names, MAX_NAMES)}; {REPLACED}. {NEW_LIST}")
        if self._layers and (new := _added(self._first, now)):
            warn(f"not measured, because added after the layers were listed: {joined(new, MAX_NAMES)}. {NEW_LIST}")
        return moved


def _added(first: Locations, now: Locations) -> list[str]:
    """Return the modules that have gained parameters; those that have also lost some were replaced, not added."""
    before, after = ({where[:2] for locations in table.values() for where in locations} for table in (first, now))
    replaced = {owner for owner, _ in before - after}
    added = (where for p, locations in now.items() if p not in first for where in locations if where[:2] not in before)
    return list(dict.fromkeys(owner or key for owner, key, *steps in added if not steps and owner not in replaced))


def _locations(root: nn.Module) -> defaultdict[nn.Parameter, set[tuple[str, ...]]]:
    """Return the locations of all parameters."""
    locations: defaultdict[nn.Parameter, set[tuple[str, ...]]] = defaultdict(set)
    for owner, module in named_modules(root):
        steps = [type(step).__qualname__ for step in module] if isinstance(module, ParametrizationList) else []
        for key, parameter in module._parameters.items():
            if parameter is not None:
                locations[parameter].add((owner, key, *steps))
    return locations


@contextmanager
def full_precision() -> Iterator[None]:
    """Disable autocast, so that norms are not computed in half precision."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
