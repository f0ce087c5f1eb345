"""Guards around what is measured: what cannot be is refused, an error costs one step, norms are in full precision."""

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
Places = Mapping[nn.Parameter, set[tuple[str, ...]]]
"""Parameter -> for each place the module, the name in it, and what a parametrization makes of it."""
LESS_MEMORY = " (low_memory=True, quantities='light' and replay_samples=2 each take less memory)"


class FailureGuard:
    """Keeps errors of the code inside ``with guard(what):`` from the training step, and counts the time it takes.

    Attributes:
        failed: whether there was an error in the step that is watched, which is not measured then.
        spent: seconds.
    """

    def __init__(self, warn: WarnOnce) -> None:
        """``warn``: is told of the first error of a step, which the others follow from."""
        self._warn = warn
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self.failed, self.spent = False, 0.0

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        """Turn any error inside into a warning that ``what`` has failed."""
        begin, spent = time.perf_counter(), self.spent
        try:
            yield
        except Exception as error:
            first, self.failed = not self.failed, True
            if first:
                advice = LESS_MEMORY if isinstance(error, torch.OutOfMemoryError) else ""
                said = f"a step was not measured: {what} failed with {type(error).__name__}: {error}"
                self._warn(said + advice, error)
        finally:
            self.spent = spent + time.perf_counter() - begin  # what ran inside has counted itself too


def check_supported(optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers around which features cannot be measured.

    Raises:
        ValueError: naming the optimizer and what can be measured.
    """
    light = f"Choose quantities='light', or a list of: {', '.join(TIERS['light'])}"
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS):
            raise ValueError(f"{type(optimizer).__name__} runs the forward several times in a step. {light}")


class ParameterTracker:
    """The places of the layers' parameters in a model, at first and now.

    Parameters that are spread over processes are not followed, for whoever spreads them puts others in their place.
    """

    def __init__(self, root: nn.Module, layers: Sequence[Layer]) -> None:
        self._root, self._layers = root, layers
        self._first = _places(root)

    def moved(self, warn: Callable[[str], None]) -> set[int]:
        """Return the layers whose weight comes from somewhere else by now; warn of them and of layers that are new."""
        now = _places(self._root)
        sources = ((i, p) for i, layer in enumerate(self._layers) for p in layer.sources if not is_distributed(p))
        found = {i for i, p in sources if not self._first[p] <= now[p]}
        if found:
            names = [self._layers[i].info.name for i in sorted(found)]
            hint = "Another fit, or another probe, measures it as it is then"
            warn(f"not measured any more: {joined(names, MAX_NAMES)}; {REPLACED}. {hint}")
        if self._layers and (new := _added(self._first, now)):
            hint = "Another fit, or another probe, measures what there is then"
            warn(f"not measured, because added after the layers were listed: {joined(new, MAX_NAMES)}. {hint}")
        return found


def _added(first: Places, now: Places) -> list[str]:
    """Return the modules that have gained parameters and lost none, for those that have are replaced."""
    before, after = ({place[:2] for every in table.values() for place in every} for table in (first, now))
    replaced = {owner for owner, _ in before - after}
    new = (place for p, every in now.items() if p not in first for place in every if place[:2] not in before)
    return list(dict.fromkeys(place[0] or place[1] for place in new if len(place) == 2 and place[0] not in replaced))


def _places(root: nn.Module) -> defaultdict[nn.Parameter, set[tuple[str, ...]]]:
    """Return the places of all parameters."""
    found: defaultdict[nn.Parameter, set[tuple[str, ...]]] = defaultdict(set)
    for owner, module in named_modules(root):
        steps = [type(step).__qualname__ for step in module] if isinstance(module, ParametrizationList) else []
        for key, parameter in module._parameters.items():
            if parameter is not None:
                found[parameter].add((owner, key, *steps))
    return found


@contextmanager
def full_precision() -> Iterator[None]:
    """Inside, no autocast: norms are not to be computed in half precision."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
