"""Contributions to the decrease of the loss: inner products of gradients and updates; changes of gradients."""

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
    gradient_norms,
    local_contribution,
    local_gradient,
    unsummed_dims,
)
from spectral_monitor.engine.weights.matrix_batches import BatchMember, MatrixBatch
from spectral_monitor.functional.feature_speed import inner_sums
from spectral_monitor.linalg import Coroutine
from spectral_monitor.state.buffers import kept
from spectral_monitor.state.dtensor import local_part


@dataclass
class Gradients:
    """The gradients of one optimizer's step."""

    # parameters that belong to no measured layer, with their values before the step
    others: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)
    trained: list[nn.Parameter] = field(default_factory=list)  # parameters that have a gradient
    norms: Tensor = field(default_factory=lambda: torch.empty(0, device="cpu"))  # of their gradients
    copies: list[Tensor] = field(default_factory=list)  # of their gradients, if the optimizer will overwrite them
    clipping: Clipping | None = None  # its effect on their gradients, if known

    @property
    def factor(self) -> Tensor | None:
        """The size of gradients before clipping over that after it, if known."""
        return None if self.clipping is None else self.clipping.factor


class ContributionStage:
    """The part of a measured step that multiplies gradients by updates, for one optimizer at a time.

    Attributes:
        overwrites: whether optimizers overwrite gradients, which are then copied before the step.
    """

    def __init__(
        self,
        members: Mapping[int, BatchMember],
        copies: Callable[[Tensor], int],
        host: bool,
        distributed: bool,
        facts: StepContext,
        out: RawScalars,
    ) -> None:
        """``copies``: the number of processes that hold a parameter; ``host``: whether copies are kept in host memory;
        ``distributed``: whether there are other processes; ``facts``: of the step, as far as they are known.
        """
        self._members, self._copies, self._host, self._distributed = members, copies, host, distributed
        self._facts, self._out = facts, out
        # layer index -> parameters, their values before the step, and the number of processes that count them
        self._originals: dict[int, list[tuple[nn.Parameter, Tensor, int]]] = {}
        self._steps = 0
        self.overwrites = False

    def before(self, optimizer: Optimizer, members: Mapping[int, BatchMember]) -> Gradients:
        """Copy the parameters that are about to change, except for matrices, which are copied anyway.

        ``optimizer``: it is about to step.
        """
        owned = {id(p) for p in parameters_of(optimizer)}
        measured = {id(p) for i, m in members.items() for p in m.layer.sources if i not in self._facts.divided}
        parameters = [p for p in parameters_of(optimizer) if p.requires_grad]
        for i, member in members.items():
            layer = member.layer
            if layer.compute is not None and not layer.tied_to and i not in self._facts.divided:
                sources = [p for p in layer.sources if id(p) in owned and member.holding.rectangles]
                self._originals[i] = [(p, kept(p.detach(), self._host), 1) for p in sources]
        return Gradients([(p, kept(local_part(p), self._host)) for p in parameters if id(p) not in measured])

    def ready(
        self,
        optimizer: Optimizer,
        members: Mapping[int, BatchMember],
        gradients: Gradients,
        arrived: tuple[tuple[Tensor, ...], Tensor] | None,
    ) -> None:
        """Note the final gradients; ``arrived``: as for :meth:`.MatrixStage.ready`."""
        gradients.trained = [p for p in parameters_of(optimizer) if p.grad is not None]
        gradients.norms = gradient_norms(gradients.trained)
        if self.overwrites and not self._host:
            gradients.copies = [p.grad.clone() for p in gradients.trained if p.grad is not None]
        if arrived is not None:
            gradients.clipping = clipping_since(arrived, gradients.trained, gradients.norms)
        for i, member in members.items():
            p = member.layer.sources[0]
            if member.layer.compute is None and i not in self._facts.divided and unsummed_dims(p):
                self._originals[i] = [(p, kept(local_part(p), self._host), self._copies(p))]

    def after(self, gradients: Gradients, shares: dict[int, Tensor]) -> list[Coroutine[None]]:
        """Return coroutines that sum contributions and changes of gradients over processes.

        Args:
            gradients: from :meth:`before`.
            shares: from :meth:`shares`.
        """
        sums = []
        if shares:
            shares = dict(sorted(shares.items()))  # the same order in every process, whichever gradients are local
            sums.append(self._contributions(shares, self._arrivals(gradients, shares), gradients.factor))
        changes = torch.zeros(4, device="cpu")  # overwritten, unevenly clipped, clipping factor, factor known
        if gradients.trained:
            # The optimizer may have overwritten gradients: old ones add weight decay in place.
            now, then = gradient_norms(gradients.trained), gradients.norms
            overwritten = ((now != then) & ~(now.isnan() & then.isnan())).any().float()
            clipping, zero = gradients.clipping, torch.zeros_like(overwritten)
            clipped = [zero] * 3 if clipping is None else [clipping.uneven, clipping.factor, torch.ones_like(zero)]
            changes = torch.stack([overwritten, *(x.to(zero) for x in clipped)])
        return [*sums, self._network(gradients, changes)]

    def shares(self, updates: Sequence[MatrixBatch]) -> dict[int, Tensor]:
        """Return the contribution of this process's part of each layer; of tied weights only the first one counts."""
        shares: dict[int, Tensor] = {}
        pairs: dict[tuple[torch.dtype, torch.device], dict[int, list[tuple[Tensor, Tensor]]]] = defaultdict(dict)
        for stack in updates:
            for i, member in stack.members.items():
                layer, parts = member.layer, []
                if layer.compute is not None and i not in self._originals and not layer.tied_to:
                    continue  # divided parameters are counted as those of no layer
                if not layer.tied_to and i not in self._facts.unused:
                    if i in self._originals:  # to first order this is the same
                        originals = [(p, old, n) for p, old, n in self._originals.pop(i) if p.grad is not None]
                        parts = [local_contribution(p, old) / n for p, old, n in originals]
                    elif (gradient := local_gradient(layer.sources[0])) is not None:
                        factors = zip(member.contents(gradient), stack.entries(i), strict=True)
                        pairs[stack.like.dtype, stack.like.device][i] = list(factors)
                        continue
                shares[i] = torch.stack(parts).sum() if parts else stack.like.new_zeros(())
        for (dtype, _), group in pairs.items():
            shares.update(zip(group, -inner_sums(list(group.values()), dtype), strict=True))
        return shares

    def _arrivals(self, gradients: Gradients, layers: Iterable[int]) -> Tensor:
        """Return, for each layer, the number of its parameters whose local gradient was not zero."""
        arrives = ((gradients.norms != 0) & (gradients.norms != -1)).float()  # -1: it was ``None``
        by_id = dict(zip(map(id, gradients.trained), arrives, strict=True))
        zero = arrives.new_zeros(())
        counts = [[by_id[id(p)] for p in self._members[i].layer.sources if id(p) in by_id] or [zero] for i in layers]
        return torch.stack([count[0] if len(count) == 1 else torch.stack(count).sum() for count in counts])

    def _contributions(self, shares: dict[int, Tensor], arrivals: Tensor, factor: Tensor | None) -> Coroutine[None]:
        local = torch.stack([share.to(next(iter(shares.values()))) for share in shares.values()])
        local = local if factor is None else local * factor.to(local)
        total, arrived = yield [local, arrivals]
        spans = one_each(shares)
        spans = {i: spans[i] for i in shares if not self._members[i].layer.tied_to and i not in self._facts.unused}
        self._out.put_each("contribution", spans, total)
        self._out.put_each("g.arrives", spans, arrived)

    def _network(self, gradients: Gradients, changes: Tensor) -> Coroutine[None]:
        """Put the contribution of parameters of no measured layer, and the changes of gradients."""
        # Computed now, for gradients may be overwritten when the coroutine runs.
        others = gradients.others
        shares = [local_contribution(p, old) / self._copies(p) for p, old in others if p.grad is not None]
        local = torch.stack(shares).sum().reshape(1) if shares else torch.zeros(1, device="cpu")
        if shares and gradients.factor is not None:
            local = local * gradients.factor.to(local)
        self._steps += 1
        return self._put_network(self._steps, local, changes, bool(shares) or (bool(others) and self._distributed))

    def _put_network(self, step: int, local: Tensor, changes: Tensor, counts: bool) -> Coroutine[None]:
        total, changes = yield [local, changes]
        if counts:
            self._out.put(NETWORK, f"contribution.{step}", total)
        self._out.put(NETWORK, f"g.changed.{step}", changes)


@contextmanager
def restored(gradients: Gradients) -> Iterator[None]:
    """Give parameters the gradients that they had before the optimizer's step, as far as copies were kept."""
    if not gradients.copies:
        yield
        return
    overwritten = [p.grad for p in gradients.trained]
    try:
        for p, gradient in zip(gradients.trained, gradients.copies, strict=True):
            p.grad = gradient
        yield
    finally:
        for p, current in zip(gradients.trained, overwritten, strict=True):
            p.grad = current
