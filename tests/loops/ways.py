"""Kinds of training loops x precision x accumulation x compilation, each cell a real run under Lightning."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.nn.functional as nnf
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn, optim

from spectral_monitor import SpectralMonitor
from tests.noninterference import zoo
from tests.noninterference.recorder import AFTER, BEFORE, Recorder, RecordingLogger, Run

BATCHES = 6


class Sharpness(optim.Optimizer):
    """Sharpness-aware minimization: uphill a bit, the gradient there, and from here a step with it."""

    def __init__(self, parameters: Any, lr: float = 0.05, rho: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr, "rho": rho})
        self.base = optim.SGD(self.param_groups, lr=lr, momentum=0.9)

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def first_step(self) -> None:
        parameters = self._parameters()
        norm = torch.stack([p.grad.norm() for p in parameters]).norm() + 1e-12
        for p in parameters:
            self.state[p]["here"] = p.detach().clone()
            p.add_(p.grad * (self.param_groups[0]["rho"] / norm))

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self._parameters():
            p.copy_(self.state[p]["here"])
        self.base.step()

    def step(self, closure: Callable[[], Any]) -> Any:
        with torch.enable_grad():
            loss = closure()
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()
        return loss


class Manual(zoo.Classifier):
    """Manual optimization with one optimizer, which steps after so many batches; by Lightning's wrapper or raw."""

    def __init__(self, *args: Any, every: int = 1, raw: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False
        self.every, self.raw = every, raw

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=not self.raw)
        loss = self.loss(batch)
        self.manual_backward(loss / self.every)
        self.log("loss", loss, batch_size=8)
        if (batch_idx + 1) % self.every == 0:
            optimizer.step()
            optimizer.zero_grad()


class ManualSharpness(Manual):
    """Two forwards and backwards a step, written out."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        self.manual_backward(self.loss(batch))
        optimizer.first_step()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.second_step()
        optimizer.zero_grad()


class Adversaries(zoo.Classifier):
    """A generator and a discriminator, each with an optimizer of its own."""

    def __init__(self, net: Callable[[], nn.Module] | None = None, every: int = 1, **kwargs: Any) -> None:
        super().__init__(net or zoo.mlp, **kwargs)
        self.automatic_optimization = False
        self.every = every
        self.net = nn.ModuleDict(
            {
                "generator": nn.Sequential(nn.Linear(4, 16), nn.ReLU(inplace=True), nn.Linear(16, 8)),
                "discriminator": nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(), nn.Dropout(0.1), nn.Linear(16, 1)),
            }
        )

    def configure_optimizers(self) -> Any:
        return [optim.Adam(self.net[name].parameters(), lr=0.01, eps=1e-4) for name in ("generator", "discriminator")]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generator, discriminator = self.net["generator"], self.net["discriminator"]
        for_generator, for_discriminator = self.optimizers()
        real = batch[0].to(next(self.parameters()).dtype)
        noise = torch.randn(len(real), 4, dtype=real.dtype)
        due = (batch_idx + 1) % self.every == 0

        said = discriminator(torch.cat([real, generator(noise).detach()])).float()
        truth = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])
        loss = nnf.binary_cross_entropy_with_logits(said, truth)
        self.manual_backward(loss / self.every)
        if due:
            for_discriminator.step()
            for_discriminator.zero_grad()

        fooled = discriminator(generator(noise)).float()
        loss = nnf.binary_cross_entropy_with_logits(fooled, torch.ones(len(real), 1))
        self.manual_backward(loss / self.every)
        if due:
            for_generator.step()
            for_generator.zero_grad()
        self.log("loss", loss, batch_size=8)


class Cast(zoo.Classifier):
    """One network; rows in the weights' precision."""

    talks = True  # self.log cannot be traced (lightning 2.6, torch 2.13)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nnf.cross_entropy(self.net(x.to(next(self.parameters()).dtype)).float(), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if self.talks else self.loss(batch)


class TwoParts(Cast):
    """Encoder and head called one after the other: no module's call is the whole forward."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        h = self.net[0](x.to(next(self.parameters()).dtype))
        return nnf.cross_entropy(self.net[1](h).float(), y)


class CastManual(Manual, Cast):
    pass


class CastSharpness(ManualSharpness, Cast):
    pass


def network() -> nn.Sequential:
    """Wide enough that the Lanczos path is taken."""
    return nn.Sequential(
        nn.Linear(8, 96), nn.ReLU(inplace=True), nn.Dropout(0.1), nn.Linear(96, 80), nn.Tanh(), nn.Linear(80, 4)
    )


def in_two_parts() -> nn.Sequential:
    whole = network()
    return nn.Sequential(whole[:4], whole[4:])


LOOPS: dict[str, Callable[..., Any]] = {
    "automatic": partial(Cast, network),
    "automatic, model called in two parts": partial(TwoParts, in_two_parts),
    "automatic, closure run twice (SAM)": partial(Cast, network, optimizer=Sharpness),
    "manual": partial(CastManual, network),
    "manual, raw optimizer": partial(CastManual, network, raw=True),
    "manual, two optimizers (GAN)": Adversaries,
    "manual, two backwards (SAM)": partial(CastSharpness, network, optimizer=Sharpness),
}
PRECISIONS = ("32-true", "64-true", "bf16-true", "bf16-mixed", "16-true", "16-mixed")
COMPILED = ("no", "a submodule", "the LightningModule")


@dataclass(frozen=True)
class Cell:
    """One way to train."""

    loop: str
    precision: str
    accumulate: int
    compiled: str

    def __str__(self) -> str:
        return f"{self.loop} | {self.precision} | accumulate {self.accumulate} | compile: {self.compiled}"

    @property
    def manual(self) -> bool:
        return self.loop.startswith("manual")

    @property
    def steps(self) -> list[int]:
        """What is measured at every step: optimizer steps, or batches with manual optimization."""
        stride = self.accumulate if self.manual else 1
        return list(range(stride, stride * (BATCHES // self.accumulate) + 1, stride))

    @property
    def refused(self) -> bool:
        """Whether the monitor declines."""
        return self.manual and self.compiled == "the LightningModule"

    def impossible(self) -> str:
        """Why Lightning or torch do not train this way, whoever watches."""
        if self.loop.endswith("(SAM)"):
            if self.accumulate > 1 and self.manual:
                return "two backwards a batch are its point"
            if self.precision == "16-mixed":
                return "the scaler calls step without a closure" if not self.manual else "the scaler is left out"
        if self.loop == "manual, raw optimizer" and self.precision == "16-mixed":
            return "a raw optimizer does not take the loss scale out"
        return ""


def cells() -> list[Cell]:
    """Every combination that can be trained."""
    every = (Cell(*combination) for combination in product(LOOPS, PRECISIONS, (1, 3), COMPILED))
    return [cell for cell in every if not cell.impossible()]


def seed() -> None:
    torch.manual_seed(1)
    np.random.seed(2)  # noqa: NPY002
    random.seed(3)


def train(cell: Cell, *monitors: SpectralMonitor, callbacks: tuple[Any, ...] = ()) -> tuple[Run, Any]:
    """One epoch; what was recorded of it, and the module."""
    seed()
    torch._dynamo.reset()
    build = LOOPS[cell.loop]
    module: Any = build(every=cell.accumulate) if cell.manual and "SAM" not in cell.loop else build()
    settings: dict[str, Any] = {} if cell.manual else {"accumulate_grad_batches": cell.accumulate}
    if cell.precision == "16-mixed":
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        settings["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler)]
    else:
        settings["precision"] = cell.precision
    run, given = Run(), module
    if cell.compiled == "a submodule":
        for name, part in list(module.net.named_children())[:1]:
            setattr(module.net, name, torch.compile(part, backend="eager"))
    elif cell.compiled == "the LightningModule":
        module.talks = False
        given = torch.compile(module, backend="eager")
    before, after = Recorder(run, "before", BEFORE, hooks=False), Recorder(run, "after", AFTER, hooks=True)
    all_callbacks = [before, *monitors, *callbacks, after]
    zoo.fit(given, zoo.loader(count=BATCHES), all_callbacks, RecordingLogger(run), **settings)
    return run, module
