"""A training loop on a device, and what the monitor costs there; for ``make gpu``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.char_transformer import CharTransformer
from benchmarks.cost.models import Size
from spectral_monitor import SpectralProbe
from spectral_monitor.engine.overhead_budget import FREE_STEPS
from spectral_monitor.engine.schedule import DEFAULT_SCHEDULE

STEPS = 400
"""Steps of which the share of training time is that of the monitor."""


@dataclass
class Loop:
    """A training loop on a device; the same at every start.

    Args:
        size: of the model and its batch.
        device: where.
        half: whether the forward is autocast to bf16.
    """

    size: Size
    device: str
    half: bool = False
    model: CharTransformer = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        s = self.size
        self.model = CharTransformer(s.vocab, s.width, s.depth, s.heads, s.context).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        tokens = torch.randint(s.vocab, (s.batch, s.context + 1), generator=torch.Generator().manual_seed(1))
        self.x, self.y = tokens[:, :-1].to(self.device), tokens[:, 1:].to(self.device)

    def forward_backward(self) -> None:
        """Form the gradients of one batch."""
        self.optimizer.zero_grad()
        with torch.autocast(self.x.device.type, torch.bfloat16, enabled=self.half):
            loss = self.model(self.x, self.y)
        loss.backward()

    def step(self, probe: SpectralProbe | None = None) -> None:
        """Train for one step, measured or not."""
        with nullcontext() if probe is None else probe.step():
            self.forward_backward()
            self.optimizer.step()

    def probe(self, quantities: str, **settings: Any) -> SpectralProbe:
        """Return a probe of every step."""
        return SpectralProbe(
            self.model, self.optimizer, every_n_steps=1, quantities=quantities, mode="observe", **settings
        )

    def everything(self) -> Iterator[Tensor]:
        """All parameters, gradients and optimizer states."""
        for p in self.model.parameters():
            yield p
            if p.grad is not None:
                yield p.grad
            yield from (value for value in self.optimizer.state[p].values() if isinstance(value, Tensor))


@dataclass(frozen=True)
class Cost:
    """Of a measured step of one tier."""

    quantities: str
    plain: float
    ratio: float
    low: float
    high: float
    plain_bytes: int
    measured_bytes: int


def cost(loop: Loop, quantities: str, wait: Callable[[], None], rounds: int = 8) -> Cost:
    """Return what a measured step costs: plain and measured steps take turns, and each pair gives a ratio."""
    probe = loop.probe(quantities)
    for _ in range(2):
        loop.step()
        loop.step(probe)
    pairs = [[timed(loop, watcher, wait) for watcher in (None, probe)] for _ in range(rounds)]
    ratios = [measured[0] / plain[0] for plain, measured in pairs]
    ordered = sorted(ratios)
    quarter = len(ordered) // 4
    return Cost(
        quantities,
        statistics.median(plain[0] for plain, _ in pairs),
        statistics.median(ratios),
        ordered[quarter],
        ordered[-1 - quarter],
        max(plain[1] for plain, _ in pairs),
        max(measured[1] for _, measured in pairs),
    )


def timed(loop: Loop, probe: SpectralProbe | None, wait: Callable[[], None]) -> tuple[float, int]:
    """Return the seconds of a step, and the most bytes of tensors meanwhile (0 on the CPU, which does not count)."""
    on_device = loop.device == "cuda"
    wait()
    if on_device:
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    loop.step(probe)
    wait()
    return time.perf_counter() - begin, torch.cuda.max_memory_allocated() if on_device else 0


def share(loop: Loop, quantities: str, wait: Callable[[], None], steps: int = STEPS) -> tuple[float, int]:
    """Return the part that the monitor adds to the time of ``steps`` steps, and how many of them it measured.

    The first hundred steps are not among them. Plain steps are timed before and after.
    """
    probe = SpectralProbe(
        loop.model,
        loop.optimizer,
        every_n_steps=DEFAULT_SCHEDULE,
        max_overhead="auto",
        quantities=quantities,
        mode="observe",
    )
    before = seconds_of(loop, None, steps // 2, wait)
    seconds_of(loop, probe, FREE_STEPS, wait)
    first = len(probe.measurements)
    watched = seconds_of(loop, probe, steps, wait)
    plain = before + seconds_of(loop, None, steps - steps // 2, wait)
    return watched / plain - 1, len(probe.measurements) - first


def seconds_of(loop: Loop, probe: SpectralProbe | None, steps: int, wait: Callable[[], None]) -> float:
    """Return the seconds of some steps."""
    wait()
    begin = time.perf_counter()
    for _ in range(steps):
        loop.step(probe)
    wait()
    return time.perf_counter() - begin
