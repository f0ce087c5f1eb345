"""What other ways of watching a run cost, each as a Lightning callback whose every step is one in which it works."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import grad_norm
from torch import Tensor


class WandbWatch(Callback):
    """``wandb.watch(log="all")`` offline: histograms of every parameter and gradient. Hooks are there in its own steps
    alone, and putting them there does not count.
    """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        import wandb

        os.environ["WANDB_SILENT"] = "true"
        self._folder = tempfile.TemporaryDirectory()
        self._run = wandb.init(project="cost", dir=self._folder.name, mode="offline")

    def enter(self, module: pl.LightningModule) -> None:
        self._run.watch(module, log="all", log_freq=1)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._run.log({"step": trainer.global_step})

    def leave(self, module: pl.LightningModule) -> None:
        self._run.unwatch(module)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._run.finish()
        self._folder.cleanup()


class ExactSVD(Callback):
    """All singular values of W, dW and W - W0 of every weight matrix."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start = [p.detach().clone() for p in _matrices(pl_module)]

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self._before = [p.detach().clone() for p in _matrices(pl_module)]

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        norms = []
        for p, before, start in zip(_matrices(pl_module), self._before, self._start, strict=True):
            for A in (before, p.detach() - before, p.detach() - start):
                norms.append(torch.linalg.svdvals(A.float()).amax())
        self.norms = torch.stack(norms).tolist()
        self._before = []


class Analyze(Callback):
    """``WeightWatcher(model).analyze()``."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        with _silent():
            import weightwatcher
        self._library = weightwatcher

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        with _silent():
            self.details = self._library.WeightWatcher(model=pl_module, log_level=logging.ERROR).analyze()


class ParameterNorms(Callback):
    """Norms of every parameter, gradient and update, each brought to the host by itself."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self._before = {name: p.detach().clone() for name, p in pl_module.named_parameters()}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self.norms: dict[str, float] = {}
        for name, p in pl_module.named_parameters():
            self.norms[f"param/{name}"] = torch.linalg.vector_norm(p.detach()).item()
            if p.grad is not None:
                self.norms[f"grad/{name}"] = torch.linalg.vector_norm(p.grad).item()
            self.norms[f"update/{name}"] = torch.linalg.vector_norm(p.detach() - self._before.pop(name)).item()


class GradNorm(Callback):
    """Lightning's own ``grad_norm``."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self.norms = {name: float(norm) for name, norm in grad_norm(pl_module, norm_type=2).items()}


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    output = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        warnings.simplefilter("ignore")
        yield


def _matrices(module: torch.nn.Module) -> list[Tensor]:
    return [p for p in module.parameters() if p.ndim >= 2]


@dataclass(frozen=True)
class Peer:
    """Another way.

    Attributes:
        what: it measures.
        make: a new callback.
        needs: the package without which it cannot run.
        slow: takes part in one round, without a warm-up.
    """

    what: str
    make: Callable[[], Callback]
    needs: str = ""
    slow: bool = False

    @property
    def missing(self) -> str:
        """Why it cannot run, if it cannot."""
        return f"{self.needs} is not installed" if self.needs and importlib.util.find_spec(self.needs) is None else ""


PEERS = {
    "`grad_norm` of Lightning": Peer("2-norm of each gradient and of all", GradNorm),
    "norms of each parameter": Peer(
        "2-norm of each parameter, gradient and update, as Composer's OptimizerMonitor does", ParameterNorms
    ),
    '`wandb.watch(log="all")`': Peer(
        "histograms of each parameter and gradient, offline, `log_freq=1`: a step that is logged", WandbWatch, "wandb"
    ),
    "exact SVD": Peer("`torch.linalg.svdvals` of the same `W`, `dW` and `W - W0`", ExactSVD, slow=True),
    "WeightWatcher": Peer(
        "spectra of `W` with fits of power laws; one call of `analyze()`", Analyze, "weightwatcher", slow=True
    ),
}
