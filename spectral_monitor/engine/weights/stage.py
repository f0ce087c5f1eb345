"""Weights, updates and drift: everything that is measured of matrices around the optimizer's step."""

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
from spectral_monitor.engine.weights.contributions import ContributionStage, Gradients, restored
from spectral_monitor.engine.weights.gradients import SUMMED, unsummed_dims
from spectral_monitor.engine.weights.matrix_batches import BatchMember, MatrixBatch, Start, chunks, matrix_batches
from spectral_monitor.engine.weights.norms import Job, MatrixNorms
from spectral_monitor.functional.feature_speed import inner_sums
from spectral_monitor.linalg import AllReduce, Coroutine, gather, run_local, sequence
from spectral_monitor.state.buffers import kept


@dataclass
class _OptimizerStep:
    """The state of one optimizer between the beginning and the end of its step."""

    members: dict[int, BatchMember]
    stacks: list[MatrixBatch]
    gradients: Gradients = field(default_factory=Gradients)
    shares: dict[int, Tensor] = field(default_factory=dict)  # contributions of this process's part of each layer
    inner: dict[int, Tensor] = field(default_factory=dict)  # the same of inner products of weights and updates


class MatrixStage:
    """The stage of a measured step that measures parameters; made for each step.

    In a single process norms are computed at the update. For models with few weights one solve is enough; otherwise
    weights, updates and drift use the same memory in turn, with a solve for each. With several processes all norms wait
    for :meth:`routine`, because there can be no exchange in the middle of a step; but each process copies only what it
    measures. With ``low_memory`` copies are kept in host memory, and layers are measured one by one.

    ``inputs``: layer index -> chosen rows of its input from all processes, if there are any.

    Attributes:
        contributions: measures gradients.
        old: layer index -> its weight before the step, if parts of feature changes are measured.
        rates: every trained parameter and its learning rate, if kernels are measured.
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
        self._steps: dict[int, _OptimizerStep] = {}
        self._host = settings.low_memory
        self._slot_bytes: dict[torch.device, int] = {}  # size of the largest stack that waits in host memory
        self._slots: dict[torch.device, Tensor] = {}  # device memory for the stacks that wait in host memory
        self._jobs: list[Job] = []
        self._waiting: list[Coroutine[None]] = []
        self.old: dict[int, Tensor] = {}
        self.rates: list[tuple[nn.Parameter, float]] = []
        self._stepper: dict[int, int] = {}
        self.contributions = ContributionStage(self.members, copies, self._host, exchange is not None, facts, out)

    @torch.no_grad()
    def before(self, optimizer: Optimizer) -> None:
        """Copy the weights that the update is about to change."""
        owned = {id(p) for p in parameters_of(optimizer)}
        members = {i: m for i, m in self._available() if any(id(p) in owned for p in m.layer.sources)}
        for i in members:
            if self._stepper.setdefault(i, id(optimizer)) != id(optimizer):
                self._facts.divided.add(i)
        if "Wdh" in self.settings.needs and self._exchange is None:
            self.old.update({i: kept(m.layer.weight().detach(), self._host) for i, m in members.items()})
        stacks = self._stacks(members) if self.settings.needs & {"W", "dW", "W0", "|g|"} else []
        for stack in stacks:
            stack.load(self._host)
        gradients = self.contributions.before(optimizer, members) if "g" in self.settings.needs else Gradients()
        self._steps[id(optimizer)] = _OptimizerStep(members, stacks, gradients)

    @torch.no_grad()
    def ready(self, optimizer: Optimizer, arrived: tuple[tuple[Tensor, ...], Tensor] | None = None) -> None:
        """Note the final gradients, and the learning rates of their parameters.

        ``arrived``: parameters and the norms of their gradients after the backward pass, if known.
        """
        step = self._steps[id(optimizer)]
        owned = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        decay = {id(group): weight_decay(optimizer, group) for group in optimizer.param_groups}
        for i, member in step.members.items():
            rates = {learning_rate(owned[id(p)]) for p in member.layer.sources if id(p) in owned}
            self._facts.lr[i] = rates.pop() if len(rates) == 1 else math.nan
            if member.layer.compute is None:
                self._facts.decay[i] = decay[id(owned[id(member.layer.sources[0])])]
            if "|g|" in self.settings.needs:
                if member.layer.compute is not None:
                    self._facts.why_not["|g|", i] = COMPUTED
                elif unsummed_dims(member.layer.sources[0]):
                    self._facts.why_not["|g|", i] = SUMMED
        if {"J", "K", "B"} & self.settings.needs:
            self.rates += [(p, learning_rate(group)) for group in optimizer.param_groups for p in group["params"]]
        self._facts.unused.update(i for i, m in step.members.items() if all(p.grad is None for p in m.layer.sources))
        # A fused optimizer divides gradients by the loss scale itself, in place: so far they are not those of the loss.
        if "g" in self.settings.needs and getattr(optimizer, "grad_scale", None) is None:
            self.contributions.ready(optimizer, step.members, step.gradients, arrived)

    @torch.no_grad()
    def after(self, optimizer: Optimizer) -> None:
        """Measure weights, updates and drift, or copy them for :meth:`routine`."""
        step = self._steps.pop(id(optimizer))
        self._facts.stepped.update(step.members)
        with restored(step.gradients):
            self._measure_all(step, self.settings.needs)
            if step.inner:
                self._sum(self._inner_products(step.inner))
            if "state" in self.settings.needs:
                self._sum(adam_state(optimizer, step.members, self._copies, self._facts, self._out))
            if "g" in self.settings.needs:
                for routine in self.contributions.after(step.gradients, step.shares):
                    self._sum(routine)

    def _measure_all(self, step: _OptimizerStep, needs: frozenset[str]) -> None:
        """Measure the stacks of a step, as many at a time as memory allows, and free their buffers."""
        if self._exchange is not None or self._host:
            for stack in step.stacks:
                self._changes([stack.to_device()], self._host, step, needs)
                stack.buffers = []
            return
        for chunk in chunks(step.stacks, len(self.settings.needs & {"dW", "W0", "W1", "|g|"})):
            self._changes([stack.to_device() for stack in chunk.stacks], chunk.in_place, step, needs)
            self._solve()

    def _changes(
        self, stacks: Sequence[MatrixBatch], in_place: bool, step: _OptimizerStep, needs: frozenset[str]
    ) -> None:
        """Measure everything of some layers; ``stacks`` are their weights before the update."""
        if "W" in needs:
            self._measure("W", stacks, in_place)
        if "dW" in needs:
            stacks = [stack.change(in_place=in_place) for stack in stacks]
            self._measure("dW", stacks, in_place)
            if "g" in needs:
                step.shares.update(self.contributions.shares(stacks))
            if "WdW" in needs:
                for stack in stacks:
                    step.inner.update(_inner_with_weights(stack))
        if "W0" in needs:
            self._measure("drift", [stack.change(self.start, in_place=in_place) for stack in stacks], in_place)
        if "W1" in needs:
            self._measure("W1", [stack.current(in_place=in_place) for stack in stacks], in_place)
        if "|g|" in needs:
            gradients = [stack.gradients(in_place=in_place) for stack in stacks]
            if (factor := step.gradients.factor) is not None:
                for buffer in (buffer for stack in gradients for buffer in stack.buffers):
                    buffer.mul_(factor.to(buffer))
            self._measure("g", gradients, in_place)

    @torch.no_grad()
    def rest(self) -> None:
        """Measure the weights and the drift of layers that no optimizer has stepped."""
        if needs := self.settings.needs & {"W", "W0"}:
            stacks = self._stacks({i: m for i, m in self._available() if i not in self._facts.stepped})
            for stack in stacks:
                stack.load()
            self._measure_all(_OptimizerStep({}, stacks), needs)

    def _available(self) -> list[tuple[int, BatchMember]]:
        """Return the layers whose weights are available: computed ones may have been replaced."""
        return [(i, m) for i, m in self.members.items() if i not in self._facts.replaced or m.layer.compute is None]

    def routine(self) -> Coroutine[None]:
        """Measure everything that waits for other processes."""
        waiting, self._waiting = self._waiting, []
        jobs, self._jobs = self._jobs, []
        # Allocated here, so that a lack of memory shows before other processes wait for this one.
        for device, size in self._slot_bytes.items():
            self._slots[device] = torch.empty(size, dtype=torch.uint8, device=device)
        if self._host:
            yield from sequence(waiting)
        else:
            yield from gather([self.norms.measure(jobs), *waiting])
        self._slots.clear()

    def _stacks(self, members: dict[int, BatchMember]) -> list[MatrixBatch]:
        return matrix_batches(members, self._exchange, single=self._host)

    def _measure(self, name: str, stacks: Sequence[MatrixBatch], in_place: bool) -> None:
        """Measure matrices now, before they are overwritten, or later in one solve."""
        self._jobs += [Job(stack, name) for stack in stacks]
        if self._host and self._exchange is not None:
            for job in self._jobs:
                stored, device = job.stack.to_host(), job.stack.like.device
                self._slot_bytes[device] = max(self._slot_bytes.get(device, 0), stored.nbytes)
                self._waiting.append(_measure_stored(self.norms, Job(stored, name), self._slots))
            self._jobs = []
        elif in_place:
            self._solve()

    def _solve(self) -> None:
        """Measure the collected matrices; for a single process only."""
        jobs, self._jobs = self._jobs, []
        run_local(self.norms.measure(jobs))

    def _sum(self, routine: Coroutine[None]) -> None:
        """Run a coroutine now, or with other processes later."""
        if self._exchange is None:
            run_local(routine)
        else:
            self._waiting.append(routine)

    def _inner_products(self, inner: dict[int, Tensor]) -> Coroutine[None]:
        """Put the inner products of weights and updates, in the same order in every process."""
        layers = sorted(inner)
        (total,) = yield [torch.stack([inner[i].to(inner[layers[0]]) for i in layers])]
        self._out.put_each("W1.dW", one_each(layers), total)


@torch.no_grad()
def start_norms(
    members: Sequence[BatchMember], start: Start, settings: Settings, exchange: AllReduce | None
) -> Coroutine[RawScalars]:
    """Return the raw scalars ``W0.sigma`` and ``W0.fro`` of the weights at the start."""
    out = RawScalars()
    norms = MatrixNorms(settings, lambda i: None, out)
    weights = {i: member for i, member in enumerate(members) if member.layer.sources}
    stacks = matrix_batches(weights, exchange, single=settings.low_memory)
    one_solve = exchange is not None and not settings.low_memory
    for batch in [stacks] if one_solve else [[stack] for stack in stacks]:
        for stack in batch:
            stack.load(start=start)
        yield from norms.measure([Job(stack.to_device(), "W0") for stack in batch])
        for stack in batch:
            stack.buffers = []
    return out


def _inner_with_weights(stack: MatrixBatch) -> dict[int, Tensor]:
    """Return, for each layer, the inner product of the local parts of its weight after the step and of its update.

    The weight before the step may have been overwritten by the update.
    """
    pairs = []
    for i, member in stack.members.items():
        weight = member.current() if member.holding.rectangles else []
        pairs.append(list(zip(weight, stack.entries(i), strict=True)))
    return dict(zip(stack.members, inner_sums(pairs, stack.like.dtype).to(stack.like.device), strict=True))


def _measure_stored(norms: MatrixNorms, job: Job, slots: Mapping[torch.device, Tensor]) -> Coroutine[None]:
    """Measure matrices that wait in host memory; they are copied to the device only when it is their turn."""
    stack = job.stack.to_device(slots[job.stack.like.device])
    yield from norms.measure([Job(stack, job.name)])
