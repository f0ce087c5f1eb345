"""Weights, updates and drift: everything that is read off matrices around the very update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spectral_monitor.engine.gradients import contribution_here, gradient_here, gradient_norms, summed_over
from spectral_monitor.engine.norms import StackNorms
from spectral_monitor.engine.patience import Patience
from spectral_monitor.engine.scalars import NETWORK, Scalars
from spectral_monitor.engine.settings import Settings
from spectral_monitor.engine.stacks import Member, Stack, Start, stacks
from spectral_monitor.functional import contribution
from spectral_monitor.linalg import Exchange, Routine, abreast, alone, in_turn
from spectral_monitor.snapshot.local import local_part
from spectral_monitor.snapshot.room import kept


@dataclass
class _Held:
    """What is kept of one optimizer between the two ends of its step."""

    members: dict[int, Member]
    stacks: list[Stack]
    trained: list[nn.Parameter] = field(default_factory=list)
    others: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)
    gradient_norms: Tensor = field(default_factory=lambda: torch.empty(0))


class MatrixStage:
    """What one measured step reads off the parameters; created anew for each.

    In a single process norms are taken right at the update, and one copy of the weights is held at a time. Where
    several measure, that waits for :meth:`routine`, for nothing may be asked of others in the middle of a step; but
    then each process holds only what it measures. With ``low_memory`` copies are held by the host, and layers are
    measured one by one.

    ``inputs``: layer index -> chosen rows of its input, those of all processes, if there are any.

    Attributes:
        lr: layer index -> learning rate at the update.
        stepped: layers whose optimizer has stepped.
        unused: layers that had no gradient.
        divided: layers whose parameters are stepped by several optimizers.
        rates: every parameter that is trained and the learning rate it meets, where kernels are asked for.
    """

    def __init__(
        self,
        members: Sequence[Member],
        settings: Settings,
        start: Start,
        inputs: Callable[[int], Tensor | None],
        copies: Callable[[Tensor], int],
        exchange: Exchange | None,
        out: Scalars,
        patience: Patience,
    ) -> None:
        self.members = dict(enumerate(members))
        self.settings = settings
        self.start = start
        self._norms = StackNorms(settings, inputs, out, patience)
        self._copies = copies
        self._exchange = exchange
        self._out = out
        self._held: dict[int, _Held] = {}
        self._originals: dict[int, list[tuple[nn.Parameter, Tensor, int]]] = {}  # with how many copies it is counted in
        self._host = settings.low_memory
        self._room: dict[torch.device, int] = {}  # bytes that the largest of what waits in host memory takes
        self._slots: dict[torch.device, Tensor] = {}
        self._total = sum(math.prod(member.layer.info.shape) for member in members)
        self._waiting: list[Routine[None]] = []
        self._steps = 0
        self.lr: dict[int, float] = {}
        self.stepped: set[int] = set()
        self.unused: set[int] = set()
        self.divided: set[int] = set()
        self.rates: list[tuple[nn.Parameter, float]] = []
        self._stepper: dict[int, int] = {}

    @torch.no_grad()
    def before(self, optimizer: Optimizer) -> None:
        """Copy what the update is about to change."""
        owned = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        mine = {i: m for i, m in self.members.items() if any(id(p) in owned for p in m.layer.sources)}
        for i in mine:
            if self._stepper.setdefault(i, id(optimizer)) != id(optimizer):
                self.divided.add(i)
        held = _Held(mine, self._stacks(mine) if self.settings.needs & {"W", "dW", "W0"} else [])
        for stack in held.stacks:
            stack.load(self._host)
        if "g" in self.settings.needs:
            measured = {id(p) for i, m in mine.items() for p in m.layer.sources if i not in self.divided}
            parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
            held.others = [(p, kept(local_part(p), self._host)) for p in parameters if id(p) not in measured]
            for i, member in mine.items():
                layer = member.layer
                if layer.compute is not None and not layer.tied_to and i not in self.divided:
                    sources = [p for p in layer.sources if id(p) in owned and member.holding.rectangles]
                    self._originals[i] = [(p, kept(p.detach(), self._host), 1) for p in sources]
        self._held[id(optimizer)] = held

    @torch.no_grad()
    def ready(self, optimizer: Optimizer) -> None:
        """Note which gradients there are, now that they are final, and the learning rates they meet."""
        held = self._held[id(optimizer)]
        owned = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        for i, member in held.members.items():
            rates = {float(owned[id(p)]["lr"]) for p in member.layer.sources if id(p) in owned}
            self.lr[i] = rates.pop() if len(rates) == 1 else math.nan
        if "J" in self.settings.needs:
            self.rates += [(p, float(group["lr"])) for group in optimizer.param_groups for p in group["params"]]
        self.unused.update(i for i, m in held.members.items() if all(p.grad is None for p in m.layer.sources))
        # A fused optimizer takes the loss scale out of the gradients by itself, in place; they are then the loss's.
        if "g" in self.settings.needs and getattr(optimizer, "grad_scale", None) is None:
            held.trained = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            held.gradient_norms = gradient_norms(held.trained)
            for i, member in held.members.items():
                p = member.layer.sources[0]
                if member.layer.compute is None and i not in self.divided and summed_over(p):
                    self._originals[i] = [(p, kept(local_part(p), self._host), self._copies(p))]

    @torch.no_grad()
    def after(self, optimizer: Optimizer) -> None:
        """Measure weights, then, in the same memory, the update, then the drift; or keep what that takes."""
        held = self._held.pop(id(optimizer))
        self.stepped.update(held.members)
        shares: dict[int, Tensor] = {}
        for stack in held.stacks:
            for part in stack.portions():
                self._measure(part.here(), shares)
            stack.buffers = []
        if shares:
            self._sum(self._contributions(shares, self._arrivals(held, shares)))
        if "g" in self.settings.needs:
            changed = torch.zeros(1)
            if held.trained:
                # What the optimizer overwrote (old ones add weight decay in place) is not the loss's gradient any more.
                now, then = gradient_norms(held.trained), held.gradient_norms
                changed = ((now != then) & ~(now.isnan() & then.isnan())).any().float().reshape(1)
            self._sum(self._network(held, changed))

    def _measure(self, part: Stack, shares: dict[int, Tensor]) -> None:
        """Everything that is read off some layers, whose weights before the update these are."""
        needs = self.settings.needs
        self._weights(part)
        if "dW" in needs:
            part = part.change()
            self._do(self._norms.update, part)
            if "g" in needs:
                shares.update((i, self._share(i, part)) for i, m in part.members.items() if self._is_known(i, m))
        if "W0" in needs:
            self._do(self._norms.drift, part.change(self.start))
        if "W1" in needs:
            self._do(self._norms.after, part.now())

    @torch.no_grad()
    def rest(self) -> None:
        """Measure the weights and the drift of what no optimizer has stepped."""
        if self.settings.needs & {"W", "W0"}:
            for stack in self._stacks({i: m for i, m in self.members.items() if i not in self.stepped}):
                for part in stack.portions():
                    part.load()
                    part = part.here()
                    self._weights(part)
                    if "W0" in self.settings.needs:
                        self._do(self._norms.drift, part.change(self.start))

    def routine(self) -> Routine[None]:
        """What waits for other processes."""
        waiting, self._waiting = self._waiting, []
        # What there is no memory for must show now, before others wait for this process.
        self._slots.update((on, torch.empty(size, dtype=torch.uint8, device=on)) for on, size in self._room.items())
        yield from (in_turn if self._host else abreast)(waiting)
        self._slots.clear()

    def _stacks(self, members: dict[int, Member]) -> list[Stack]:
        return stacks(members, self._exchange, self._total, single=self._host)

    def _do(self, measure: Callable[[Stack], Routine[None]], part: Stack) -> None:
        """Measure some layers now or, where others take part, when their turn comes."""
        if self._exchange is None:
            alone(measure(part))
        elif self._host:
            away, device = part.away(), part.like.device
            self._room[device] = max(self._room.get(device, 0), away.nbytes)
            self._waiting.append(_fetched(measure, away, self._slots))
        else:
            self._waiting.append(measure(part))

    def _sum(self, routine: Routine[None]) -> None:
        """The same of what takes no matrices."""
        if self._exchange is None:
            alone(routine)
        else:
            self._waiting.append(routine)

    def _weights(self, part: Stack) -> None:
        if "W" in self.settings.needs:
            self._do(self._norms.weight, part)

    def _is_known(self, i: int, member: Member) -> bool:
        """Whether it can be said what a layer contributes; if its parameters are divided, they are counted as such."""
        return member.layer.compute is None or i in self._originals or bool(member.layer.tied_to)

    def _share(self, i: int, stack: Stack) -> Tensor:
        """What this process's part of a layer contributes; of tied weights the first one counts."""
        layer = stack.members[i].layer
        nothing: Tensor = stack.like.new_zeros(())
        if layer.tied_to or i in self.unused:
            return nothing
        if layer.compute is not None or i in self._originals:  # to first order this is the same
            parts = [contribution_here(p, old) / n for p, old, n in self._originals.pop(i, ()) if p.grad is not None]
        else:
            gradient = gradient_here(layer.sources[0])
            if gradient is None:
                return nothing
            contents = stack.members[i].contents(gradient)
            parts = [contribution(contents[k][:, rows], dW) for k, rows, dW in stack.entries(i)]
        total: Tensor = torch.stack(parts).sum() if parts else nothing
        return total

    def _arrivals(self, held: _Held, layers: Iterable[int]) -> Tensor:
        """Of each layer, how many of its parameters have a gradient here that is not zero, whatever the update kept."""
        norms = held.gradient_norms
        arrives = ((norms != 0) & (norms != -1)).float()  # -1: it is gone
        known = dict(zip(map(id, held.trained), arrives, strict=True))
        none = arrives.new_zeros(())
        counts = [[known[id(p)] for p in self.members[i].layer.sources if id(p) in known] or [none] for i in layers]
        return torch.stack([count[0] if len(count) == 1 else torch.stack(count).sum() for count in counts])

    def _contributions(self, shares: dict[int, Tensor], arrivals: Tensor) -> Routine[None]:
        here = torch.stack([share.to(next(iter(shares.values()))) for share in shares.values()])
        total, arrived = yield [here, arrivals]
        for i, value, gradients in zip(shares, total, arrived, strict=True):
            if not self.members[i].layer.tied_to and i not in self.unused:
                self._out.put(i, "contribution", value)
                self._out.put(i, "g.arrives", gradients)

    def _network(self, held: _Held, changed: Tensor) -> Routine[None]:
        """What parameters that are not measured contribute, and whether gradients were overwritten."""
        self._steps += 1
        name = self._steps
        shares = [contribution_here(p, old) / self._copies(p) for p, old in held.others if p.grad is not None]
        here = torch.stack(shares).sum().reshape(1) if shares else torch.zeros(1)
        total, changed = yield [here, changed]
        if shares or (held.others and self._exchange is not None):
            self._out.put(NETWORK, f"contribution.{name}", total)
        self._out.put(NETWORK, f"g.changed.{name}", changed)


@torch.no_grad()
def start_norms(
    members: Sequence[Member], start: Start, settings: Settings, exchange: Exchange | None
) -> Routine[Scalars]:
    """Raw scalars ``W0.sigma`` and ``W0.fro`` of the weights at the start."""
    out = Scalars()
    norms = StackNorms(settings, lambda i: None, out, None)
    total = sum(math.prod(member.layer.info.shape) for member in members)
    found = stacks(dict(enumerate(members)), exchange, total, single=settings.low_memory)
    routines = (_started(part, start, norms) for stack in found for part in stack.portions())
    yield from (in_turn if exchange is None or settings.low_memory else abreast)(routines)
    return out


def _started(part: Stack, start: Start, norms: StackNorms) -> Routine[None]:
    part.begin(start)
    yield from norms.start(part.here())


def _fetched(
    measure: Callable[[Stack], Routine[None]], away: Stack, slots: Mapping[torch.device, Tensor]
) -> Routine[None]:
    """What is measured of layers that the host holds, when their turn comes."""
    yield from measure(away.here(slots[away.like.device]))
