"""Contributions to the decrease of the loss: inner products of gradients and updates, and what befalls gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spectral_monitor.capture.unwrap import parameters_of
from spectral_monitor.engine.results.raw import NETWORK, RawScalars, one_each
from spectral_monitor.engine.results.reasons import StepContext
from spectral_monitor.engine.weights.gradients import (
    Clipping,
    clipping_since,
    contribution_here,
    gradient_here,
    gradient_norms,
    summed_over,
)
from spectral_monitor.engine.weights.matrix_batches import BatchMember, MatrixBatch
from spectral_monitor.functional.feature_speed import inner_sums
from spectral_monitor.linalg import Coroutine
from spectral_monitor.state.buffers import kept
from spectral_monitor.state.dtensor import local_part


@dataclass
class Gradients:
    """The gradients of one optimizer's step."""

    # parameters of no measured layer, with their values before the step
    others: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)
    trained: list[nn.Parameter] = field(default_factory=list)  # parameters that have a gradient
    norms: Tensor = field(default_factory=lambda: torch.empty(0, device="cpu"))  # of these gradients
    copies: list[Tensor] = field(default_factory=list)  # of these gradients, where the optimizer will overwrite them
    clipping: Clipping | None = None  # what clipping has done to them, where that is known

    @property
    def factor(self) -> Tensor | None:
        """By which gradients were larger before they were clipped, if they were."""
        return None if self.clipping is None else self.clipping.factor


class ContributionStage:
    """The part of a measured step that multiplies gradients with updates; one of several optimizers at a time.

    Attributes:
        overwrites: whether optimizers are known to overwrite gradients, which are then copied before the step.
    """

    def __init__(
        self,
        members: Mapping[int, BatchMember],
        copies: Callable[[Tensor], int],
        host: bool,
        several: bool,
        facts: StepContext,
        out: RawScalars,
    ) -> None:
        """``copies``: on how many processes a parameter is; ``host``: whether copies are held by the host; ``several``:
        whether there are other processes; ``facts``: of the step, as far as they are known.
        """
        self._members, self._copies, self._host, self._several = members, copies, host, several
        self._facts, self._out = facts, out
        self._originals: dict[int, list[tuple[nn.Parameter, Tensor, int]]] = {}  # with how many copies it is counted in
        self._steps = 0
        self.overwrites = False

    def before(self, optimizer: Optimizer, mine: Mapping[int, BatchMember]) -> Gradients:
        """Copy what is about to change and is no matrix that is copied anyway.

        Args:
            optimizer: about to step.
            mine: the layers it trains.
        """
        owned = {id(p) for p in parameters_of(optimizer)}
        measured = {id(p) for i, m in mine.items() for p in m.layer.sources if i not in self._facts.divided}
        parameters = [p for p in parameters_of(optimizer) if p.requires_grad]
        for i, member in mine.items():
            layer = member.layer
            if layer.compute is not None and not layer.tied_to and i not in self._facts.divided:
                sources = [p for p in layer.sources if id(p) in owned and member.holding.rectangles]
                self._originals[i] = [(p, kept(p.detach(), self._host), 1) for p in sources]
        return Gradients([(p, kept(local_part(p), self._host)) for p in parameters if id(p) not in measured])

    def ready(
        self,
        optimizer: Optimizer,
        mine: Mapping[int, BatchMember],
        held: Gradients,
        arrived: tuple[tuple[Tensor, ...], Tensor] | None,
    ) -> None:
        """Note gradients now that they are final; ``arrived``: as for :meth:`.MatrixStage.ready`."""
        held.trained = [p for p in parameters_of(optimizer) if p.grad is not None]
        held.norms = gradient_norms(held.trained)
        if self.overwrites and not self._host:
            held.copies = [p.grad.clone() for p in held.trained if p.grad is not None]
        if arrived is not None:
            held.clipping = clipping_since(arrived, held.trained, held.norms)
        for i, member in mine.items():
            p = member.layer.sources[0]
            if member.layer.compute is None and i not in self._facts.divided and summed_over(p):
                self._originals[i] = [(p, kept(local_part(p), self._host), self._copies(p))]

    def after(self, held: Gradients, shares: dict[int, Tensor]) -> list[Coroutine[None]]:
        """Return what sums contributions, and what tells how gradients were changed.

        Args:
            held: what :meth:`before` returned.
            shares: what :meth:`shares` has found.
        """
        sums = []
        if shares:
            shares = dict(sorted(shares.items()))  # one order on every process, whichever gradients are here
            sums.append(self._contributions(shares, self._arrivals(held, shares), held.factor))
        changed = torch.zeros(4, device="cpu")
        if held.trained:
            # What the optimizer overwrote (old ones add weight decay in place) is not the loss's gradient any more.
            now, then = gradient_norms(held.trained), held.norms
            changed = ((now != then) & ~(now.isnan() & then.isnan())).any().float()
            clipping, none = held.clipping, torch.zeros_like(changed)
            known = [none] * 3 if clipping is None else [clipping.uneven, clipping.factor, torch.ones_like(changed)]
            changed = torch.stack([changed, *(x.to(changed) for x in known)])
        return [*sums, self._network(held, changed)]

    def shares(self, found: Sequence[MatrixBatch]) -> dict[int, Tensor]:
        """Return what this process's part of each layer contributes, given its update; of tied weights the first one
        counts.
        """
        shares: dict[int, Tensor] = {}
        pairs: dict[tuple[torch.dtype, torch.device], dict[int, list[tuple[Tensor, Tensor]]]] = defaultdict(dict)
        for stack in found:
            for i, member in stack.members.items():
                layer, parts = member.layer, []
                if layer.compute is not None and i not in self._originals and not layer.tied_to:
                    continue  # divided parameters are counted as such
                if not layer.tied_to and i not in self._facts.unused:
                    if i in self._originals:  # to first order this is the same
                        kept_here = [(p, old, n) for p, old, n in self._originals.pop(i) if p.grad is not None]
                        parts = [contribution_here(p, old) / n for p, old, n in kept_here]
                    elif (gradient := gradient_here(layer.sources[0])) is not None:
                        both = zip(member.contents(gradient), stack.entries(i), strict=True)
                        pairs[stack.like.dtype, stack.like.device][i] = list(both)
                        continue
                shares[i] = torch.stack(parts).sum() if parts else stack.like.new_zeros(())
        for (dtype, _), some in pairs.items():
            shares.update(zip(some, -inner_sums(list(some.values()), dtype), strict=True))
        return shares

    def _arrivals(self, held: Gradients, layers: Iterable[int]) -> Tensor:
        """Return, for each layer, how many of its parameters have a local gradient that is not zero, whatever the
        update kept.
        """
        arrives = ((held.norms != 0) & (held.norms != -1)).float()  # -1: it is gone
        known = dict(zip(map(id, held.trained), arrives, strict=True))
        none = arrives.new_zeros(())
        counts = [[known[id(p)] for p in self._members[i].layer.sources if id(p) in known] or [none] for i in layers]
        return torch.stack([count[0] if len(count) == 1 else torch.stack(count).sum() for count in counts])

    def _contributions(self, shares: dict[int, Tensor], arrivals: Tensor, factor: Tensor | None) -> Coroutine[None]:
        here = torch.stack([share.to(next(iter(shares.values()))) for share in shares.values()])
        here = here if factor is None else here * factor.to(here)
        total, arrived = yield [here, arrivals]
        places = one_each(shares)
        spans = {i: places[i] for i in shares if not self._members[i].layer.tied_to and i not in self._facts.unused}
        self._out.put_each("contribution", spans, total)
        self._out.put_each("g.arrives", spans, arrived)

    def _network(self, held: Gradients, changed: Tensor) -> Coroutine[None]:
        """Return the contribution of parameters that are not measured, and what has befallen gradients: whether they
        were overwritten, or clipped otherwise than by a factor, that factor, and in how many processes it is known.
        """
        # At once: gradients may be overwritten when the coroutine is run.
        shares = [contribution_here(p, old) / self._copies(p) for p, old in held.others if p.grad is not None]
        here = torch.stack(shares).sum().reshape(1) if shares else torch.zeros(1, device="cpu")
        if shares and held.factor is not None:
            here = here * held.factor.to(here)
        self._steps += 1
        return self._put_network(self._steps, here, changed, bool(shares) or (bool(held.others) and self._several))

    def _put_network(self, name: int, here: Tensor, changed: Tensor, counts: bool) -> Coroutine[None]:
        total, changed = yield [here, changed]
        if counts:
            self._out.put(NETWORK, f"contribution.{name}", total)
        self._out.put(NETWORK, f"g.changed.{name}", changed)


@contextmanager
def given_back(held: Gradients) -> Iterator[None]:
    """Inside, parameters have the gradients that the optimizer was given, where copies of them were kept."""
    if not held.copies:
        yield
        return
    overwritten = [p.grad for p in held.trained]
    try:
        for p, given in zip(held.trained, held.copies, strict=True):
            p.grad = given
        yield
    finally:
        for p, gradient in zip(held.trained, overwritten, strict=True):
            p.grad = gradient
