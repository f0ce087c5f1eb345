"""Weights, updates and drift: everything that is read off matrices around the optimizer's step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spectral_monitor.capture.unwrap import parameters_of
from spectral_monitor.condition.optimizers.hyperparameters import learning_rate, weight_decay
from spectral_monitor.engine.results.raw import RawScalars, one_each
from spectral_monitor.engine.results.reasons import StepContext
from spectral_monitor.engine.settings import Settings
from spectral_monitor.engine.weights.adam_state import COMPUTED, adam_state
from spectral_monitor.engine.weights.contributions import ContributionStage, Gradients, given_back
from spectral_monitor.engine.weights.gradients import SUMMED, summed_over
from spectral_monitor.engine.weights.matrix_batches import BatchMember, MatrixBatch, Start, chunks, matrix_batches
from spectral_monitor.engine.weights.norms import Job, MatrixNorms
from spectral_monitor.functional.feature_speed import inner_sums
from spectral_monitor.linalg import AllReduce, Coroutine, gather, run_local, sequence
from spectral_monitor.state.buffers import kept


@dataclass
class _Held:
    """State of one optimizer between the two ends of its step."""

    members: dict[int, BatchMember]
    stacks: list[MatrixBatch]
    gradients: Gradients = field(default_factory=Gradients)
    shares: dict[int, Tensor] = field(default_factory=dict)  # what this process's part of each layer contributes
    inner: dict[int, Tensor] = field(default_factory=dict)  # and of the products of weights and updates


class MatrixStage:
    """The stage of a measured step that measures parameters; made for each step.

    In a single process norms are taken right at the update: all in one solve or, of models with many weights, in three,
    of weights, updates and drift, which lie in the same memory one after the other. Where several measure, that waits
    for :meth:`routine`, for nothing may be asked of others in the middle of a step; but then each process holds only
    what it measures. With ``low_memory`` copies are held by the host, and layers are measured one by one.

    ``inputs``: layer index -> chosen rows of its input, those of all processes, if there are any.

    Attributes:
        contributions: measures what gradients say.
        old: layer index -> its weight before the step, where parts of changes are asked for.
        rates: every parameter that is trained and the learning rate it meets, where kernels are asked for.
    """

    def __init__(
        self,
        members: Sequence[BatchMember],
        settings: Settings,
        start: Start,
        inputs: Callable[[int], Tensor | None],
        copies: Callable[[Tensor], int],
        exchange: AllReduce | None,
        facts: StepContext,
        out: RawScalars,
    ) -> None:
        self.members = {i: member for i, member in enumerate(members) if member.layer.sources}
        self.settings = settings
        self.start = start
        self.norms = MatrixNorms(settings, inputs, out)
        self._copies = copies
        self._exchange = exchange
        self._facts = facts
        self._out = out
        self._held: dict[int, _Held] = {}
        self._host = settings.low_memory
        self._room: dict[torch.device, int] = {}  # bytes that the largest of what waits in host memory takes
        self._slots: dict[torch.device, Tensor] = {}
        self._jobs: list[Job] = []
        self._waiting: list[Coroutine[None]] = []
        self.old: dict[int, Tensor] = {}
        self.rates: list[tuple[nn.Parameter, float]] = []
        self._stepper: dict[int, int] = {}
        self.contributions = ContributionStage(self.members, copies, self._host, exchange is not None, facts, out)

    @torch.no_grad()
    def before(self, optimizer: Optimizer) -> None:
        """Copy what the update is about to change."""
        owned = {id(p) for p in parameters_of(optimizer)}
        mine = {i: m for i, m in self._there() if any(id(p) in owned for p in m.layer.sources)}
        for i in mine:
            if self._stepper.setdefault(i, id(optimizer)) != id(optimizer):
                self._facts.divided.add(i)
        if "Wdh" in self.settings.needs and self._exchange is None:
            self.old.update({i: kept(m.layer.weight().detach(), self._host) for i, m in mine.items()})
        stacks = self._stacks(mine) if self.settings.needs & {"W", "dW", "W0", "|g|"} else []
        for stack in stacks:
            stack.load(self._host)
        gradients = self.contributions.before(optimizer, mine) if "g" in self.settings.needs else Gradients()
        self._held[id(optimizer)] = _Held(mine, stacks, gradients)

    @torch.no_grad()
    def ready(self, optimizer: Optimizer, arrived: tuple[tuple[Tensor, ...], Tensor] | None = None) -> None:
        """Note which gradients there are, now that they are final, and the learning rates they meet.

        ``arrived``: parameters and the norms of their gradients as backward passes left them, where that is known.
        """
        held = self._held[id(optimizer)]
        owned = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        decay = {id(group): weight_decay(optimizer, group) for group in optimizer.param_groups}
        for i, member in held.members.items():
            rates = {learning_rate(owned[id(p)]) for p in member.layer.sources if id(p) in owned}
            self._facts.lr[i] = rates.pop() if len(rates) == 1 else math.nan
            if member.layer.compute is None:
                self._facts.decay[i] = decay[id(owned[id(member.layer.sources[0])])]
            if "|g|" in self.settings.needs and (
                member.layer.compute is not None or summed_over(member.layer.sources[0])
            ):
                self._facts.why_not["|g|", i] = SUMMED if member.layer.compute is None else COMPUTED
        if {"J", "K", "B"} & self.settings.needs:
            self.rates += [(p, learning_rate(group)) for group in optimizer.param_groups for p in group["params"]]
        self._facts.unused.update(i for i, m in held.members.items() if all(p.grad is None for p in m.layer.sources))
        # A fused optimizer takes the loss scale out of the gradients by itself, in place; they are then the loss's.
        if "g" in self.settings.needs and getattr(optimizer, "grad_scale", None) is None:
            self.contributions.ready(optimizer, held.members, held.gradients, arrived)

    @torch.no_grad()
    def after(self, optimizer: Optimizer) -> None:
        """Measure weights, then, in the same memory, the update, then the drift; or keep what that takes."""
        held = self._held.pop(id(optimizer))
        self._facts.stepped.update(held.members)
        with given_back(held.gradients):
            self._measure_all(held, self.settings.needs)
            if held.inner:
                self._sum(self._inner_products(held.inner))
            if "state" in self.settings.needs:
                self._sum(adam_state(optimizer, held.members, self._copies, self._facts, self._out))
            if "g" in self.settings.needs:
                for routine in self.contributions.after(held.gradients, held.shares):
                    self._sum(routine)

    def _measure_all(self, held: _Held, needs: frozenset[str]) -> None:
        """Measure stacks with memory, as many at a time as there is room for; that is gone then."""
        if self._exchange is not None or self._host:
            for stack in held.stacks:
                self._changes([stack.here()], self._host, held, needs)
                stack.buffers = []
            return
        for portion in chunks(held.stacks, len(self.settings.needs & {"dW", "W0", "W1", "|g|"})):
            self._changes([stack.here() for stack in portion.stacks], portion.in_place, held, needs)
            self._solve()

    def _changes(self, found: Sequence[MatrixBatch], in_place: bool, held: _Held, needs: frozenset[str]) -> None:
        """Measure everything that is read off some layers, whose weights before the update these are."""
        if "W" in needs:
            self._measure("W", found, in_place)
        if "dW" in needs:
            found = [stack.change(in_place=in_place) for stack in found]
            self._measure("dW", found, in_place)
            if "g" in needs:
                held.shares.update(self.contributions.shares(found))
            if "WdW" in needs:
                for stack in found:
                    held.inner.update(_with_weights(stack))
        if "W0" in needs:
            self._measure("drift", [stack.change(self.start, in_place=in_place) for stack in found], in_place)
        if "W1" in needs:
            self._measure("W1", [stack.now(in_place=in_place) for stack in found], in_place)
        if "|g|" in needs:
            gradients = [stack.gradients(in_place=in_place) for stack in found]
            if (factor := held.gradients.factor) is not None:
                for buffer in (buffer for stack in gradients for buffer in stack.buffers):
                    buffer.mul_(factor.to(buffer))
            self._measure("g", gradients, in_place)

    @torch.no_grad()
    def rest(self) -> None:
        """Measure the weights and the drift of what no optimizer has stepped."""
        if needs := self.settings.needs & {"W", "W0"}:
            found = self._stacks({i: m for i, m in self._there() if i not in self._facts.stepped})
            for stack in found:
                stack.load()
            self._measure_all(_Held({}, found), needs)

    def _there(self) -> list[tuple[int, BatchMember]]:
        """Return the layers whose weights can be had: what one was computed by may be gone."""
        return [(i, m) for i, m in self.members.items() if i not in self._facts.replaced or m.layer.compute is None]

    def routine(self) -> Coroutine[None]:
        """Measure what waits for other processes."""
        waiting, self._waiting = self._waiting, []
        jobs, self._jobs = self._jobs, []
        # What there is no memory for must show now, before others wait for this process.
        self._slots.update((on, torch.empty(size, dtype=torch.uint8, device=on)) for on, size in self._room.items())
        if self._host:
            yield from sequence(waiting)
        else:
            yield from gather([self.norms.measure(jobs), *waiting])
        self._slots.clear()

    def _stacks(self, members: dict[int, BatchMember]) -> list[MatrixBatch]:
        return matrix_batches(members, self._exchange, single=self._host)

    def _measure(self, name: str, found: Sequence[MatrixBatch], in_place: bool) -> None:
        """Measure matrices now, before others take their place, or with everything else."""
        self._jobs += [Job(stack, name) for stack in found]
        if self._host and self._exchange is not None:
            for job in self._jobs:
                away, device = job.stack.away(), job.stack.like.device
                self._room[device] = max(self._room.get(device, 0), away.nbytes)
                self._waiting.append(_fetched(self.norms, Job(away, name), self._slots))
            self._jobs = []
        elif in_place:
            self._solve()

    def _solve(self) -> None:
        """Measure what has been put off; of a single process."""
        jobs, self._jobs = self._jobs, []
        run_local(self.norms.measure(jobs))

    def _sum(self, routine: Coroutine[None]) -> None:
        """Put the sums of what takes no matrices."""
        if self._exchange is None:
            run_local(routine)
        else:
            self._waiting.append(routine)

    def _inner_products(self, inner: dict[int, Tensor]) -> Coroutine[None]:
        """Put the products of weights and updates, in one order on every process."""
        layers = sorted(inner)
        (total,) = yield [torch.stack([inner[i].to(inner[layers[0]]) for i in layers])]
        self._out.put_each("W1.dW", one_each(layers), total)


@torch.no_grad()
def start_norms(
    members: Sequence[BatchMember], start: Start, settings: Settings, exchange: AllReduce | None
) -> Coroutine[RawScalars]:
    """Raw scalars ``W0.sigma`` and ``W0.fro`` of the weights at the start."""
    out = RawScalars()
    norms = MatrixNorms(settings, lambda i: None, out)
    weights = {i: member for i, member in enumerate(members) if member.layer.sources}
    found = matrix_batches(weights, exchange, single=settings.low_memory)
    together = exchange is not None and not settings.low_memory
    for some in [found] if together else [[stack] for stack in found]:
        for stack in some:
            stack.load(start=start)
        yield from norms.measure([Job(stack.here(), "W0") for stack in some])
        for stack in some:
            stack.buffers = []
    return out


def _with_weights(stack: MatrixBatch) -> dict[int, Tensor]:
    """Return, for each layer, the inner product of what is here of its weight after the step and of its update.

    The weight before the step may be gone, for its update may lie in its memory.
    """
    pairs = []
    for i, member in stack.members.items():
        now = member.now() if member.holding.rectangles else []
        pairs.append(list(zip(now, stack.entries(i), strict=True)))
    return dict(zip(stack.members, inner_sums(pairs, stack.like.dtype).to(stack.like.device), strict=True))


def _fetched(norms: MatrixNorms, away: Job, slots: Mapping[torch.device, Tensor]) -> Coroutine[None]:
    """Measure layers that the host holds, when their turn comes."""
    stack = away.stack.here(slots[away.stack.like.device])
    yield from norms.measure([Job(stack, away.name)])
