"""Small modules, each with something of its own that a second forward must not disturb."""

from __future__ import annotations

import copy
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as nnf
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassConfusionMatrix

CLASSES = 4


class Batches(Dataset):
    """Batches made anew at every access, always the same: rows, images, tokens; as tuples or as dicts."""

    def __init__(self, kind: str = "rows", count: int = 6, size: int = 8, as_dict: bool = False) -> None:
        self.kind, self.count, self.size, self.as_dict = kind, count, size, as_dict

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if index >= self.count:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(100 + index)
        shape = {"rows": (8,), "images": (3, 6, 6), "tokens": (5,)}[self.kind]
        y = torch.randint(CLASSES, (self.size,), generator=generator)
        if self.kind == "tokens":
            x = torch.randint(11, (self.size, *shape), generator=generator)
        else:
            x = torch.randn(self.size, *shape, generator=generator, dtype=torch.get_default_dtype())
        return {"x": x, "y": y, "ids": list(range(3))} if self.as_dict else (x, y)


def loader(*args: Any, **kwargs: Any) -> DataLoader:
    """Batches as they are."""
    return DataLoader(Batches(*args, **kwargs), batch_size=None)


def mlp(dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, CLASSES)
    )


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.Dropout(0.2),
        nn.Conv2d(6, 8, 3, stride=2),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(32, CLASSES),
    )


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.dropout(self.down(nnf.gelu(self.up(self.second(x)))))


class Transformer(nn.Module):
    """Two blocks over tokens; checkpointed blocks are computed again in the backward pass."""

    def __init__(self, reentrant: bool | None = None, tied: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.tokens, self.positions = nn.Embedding(11, 8), nn.Parameter(torch.randn(5, 8) * 0.1)
        self.blocks = nn.ModuleList([Block(8), Block(8)])
        self.head = nn.Linear(8, 11 if tied else CLASSES, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.positions
        for block in self.blocks:
            h = block(h) if self.reentrant is None else checkpoint(block, h, use_reentrant=self.reentrant)
        return self.head(h.mean(1))[:, :CLASSES]


class Classifier(pl.LightningModule):
    """One network, called once; the base of all others."""

    def __init__(
        self,
        net: Callable[[], nn.Module] = mlp,
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        scheduler: Callable[..., Any] | None = None,
        **schedule: Any,
    ) -> None:
        super().__init__()
        self.net = net()
        self._optimizer = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
        self._scheduler, self._schedule = scheduler, schedule

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nnf.cross_entropy(self.net(x).float(), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, batch_size=8)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=8)

    def configure_optimizers(self) -> Any:
        optimizer = self._optimizer(self.parameters())
        if self._scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self._scheduler(optimizer), **self._schedule}}


class WithMetrics(Classifier):
    """torchmetrics in the training step, tensor states, list states, compute groups; forward called in two parts."""

    parts = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.accuracy = MulticlassAccuracy(CLASSES)
        self.area = MulticlassAUROC(CLASSES)  # keeps lists
        self.mean = MeanMetric()
        self.both = MetricCollection([MulticlassAccuracy(CLASSES, average="micro"), MulticlassConfusionMatrix(CLASSES)])

    def _logits(self, x: Tensor) -> Tensor:
        return self.net[3:](self.net[:3](x)) if self.parts else self.net(x)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        logits = self._logits(x).float()
        loss = nnf.cross_entropy(logits, y)
        self.accuracy(logits, y)
        self.area.update(logits, y)
        self.mean.update(loss.detach())
        self.both.update(logits.detach(), y)
        self.log("accuracy", self.accuracy, batch_size=8)
        self.log("mean", self.mean, on_step=True, on_epoch=True, batch_size=8)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("area", self.area.compute())
        self.area.reset()


class WithMetricsInParts(WithMetrics):
    parts = True


class Restless(nn.Module):
    """Draws from every generator, counts its calls, remembers in plain Python what it did."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, CLASSES)
        self.count, self.seen, self.recent = 0, [], deque(maxlen=3)
        self.hidden: Tensor | None = None
        self.names = Counter()
        self.nested = {"sizes": [], "by": defaultdict(list), "pair": ([], {})}
        self.register_buffer("running", torch.zeros(12))
        self.register_buffer("quiet", torch.zeros(12), persistent=False)
        self.own = torch.Generator().manual_seed(3)
        self.own_python, self.own_numpy = random.Random(4), np.random.default_rng(5)
        self.array = np.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.seen.append(float(x.detach().float().mean()))
        self.recent.append(x.shape)
        self.names.update([f"rows{len(x)}", f"call{self.count}"])
        self.nested["sizes"].append(len(x))
        self.nested["by"][self.count].append(self.count)
        self.nested["pair"][0].append(1)
        self.nested["pair"][1][self.count] = 2
        self.array += 1
        if random.random() < 0.7:
            x = x * float(np.random.uniform(0.5, 1.5))  # noqa: NPY002
        x = x + 0.1 * torch.randn(x.shape, dtype=x.dtype, generator=self.own)
        x = x * (1 + 0.1 * self.own_python.random() + 0.1 * float(self.own_numpy.random()))
        h = nnf.dropout(self.first(x), 0.2, self.training)
        if self.hidden is not None:
            h = h + 0.5 * self.hidden
        self.hidden = h.detach().mean(0)
        self.running.mul_(0.9).add_(0.1 * self.hidden)
        self.quiet.data.copy_(0.5 * self.quiet.data + self.hidden)  # as vector quantizers do: no version is counted
        return self.last(torch.tanh(h))


class RestlessStep(Classifier):
    """A training step with a memory, that draws after the forward too."""

    parts = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(Restless, **kwargs)
        self.steps, self.losses = 0, []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        loss = super().training_step(batch, batch_idx) * (1 + 0.01 * random.random())
        loss = loss + 0.01 * torch.rand(()) + 0.01 * float(np.random.rand())  # noqa: NPY002
        if self.parts:
            loss = loss + 0.1 * self.net(batch[0]).square().mean()
        self.losses.append(loss.detach())
        return loss


class RestlessStepInParts(RestlessStep):
    parts = True


class EncoderThenHead(Classifier):
    """Two networks called in turn: only the training step knows the way from one to the other."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(cnn, **kwargs)
        self.encoder, self.head = self.net[:-1], self.net[-1]
        del self.net

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nnf.cross_entropy(self.head(self.encoder(x)).float(), y)


class Popper(EncoderThenHead):
    """Empties its batch, changes it in place, talks to the logger, returns a dict."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        y, ids = batch.pop("y"), batch["ids"]
        x = batch["x"].mul_(0.5)
        ids.pop()
        h = self.encoder(x)
        logits = self.head(h).float()
        loss = nnf.cross_entropy(logits, y)
        self.log_dict({"loss": loss, "rows": float(len(x))}, batch_size=8)
        self.log("h", h.detach().float().norm(), on_step=False, on_epoch=True, reduce_fx="max", batch_size=8)
        self.logger.experiment.add_scalar("direct", loss.item(), self.global_step)
        self.logger.log_metrics({"by hand": loss.item()}, step=self.global_step)
        self.trainer.logger.log_metrics({"by the trainer": loss.item()}, step=self.global_step)
        return {"loss": loss, "logits": logits.detach()}


class Teacher(Classifier):
    """A student and the teacher that follows it, moved inside the training step."""

    hide = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(lambda: mlp(dropout=0.2), **kwargs)
        net = self.net
        teacher = copy.deepcopy(net).requires_grad_(False)
        if self.hide:
            self.others = {"teachers": [teacher]}  # kept out of parameters() and of checkpoints
        else:
            del self.net
            self.teacher, self.net = teacher, net  # the last one has the readout

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        teacher = self.others["teachers"][0] if self.hide else self.teacher
        teacher.to(x)
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), self.net.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
            for slow, fast in zip(teacher.parameters(), self.net.parameters(), strict=True):
                slow.data.lerp_(fast.data, 0.01)
            target = teacher(x).softmax(-1)
        logits = self.net[3:](self.net[:3](x)) if self.hide else self.net(x)
        loss = nnf.cross_entropy(logits, y) + (logits.softmax(-1) - target).square().sum()
        self.log("loss", loss, batch_size=8)
        return loss


class HiddenTeacher(Teacher):
    hide = True


class InPlace(nn.Module):
    """Changes its input, its activations and views of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 12), nn.Linear(12, 12), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x[:, 0].zero_()
        x.add_(0.1)
        h = nnf.relu_(self.first(x))
        h = self.second(h).add_(1.0)
        h[:, :3].mul_(0.5)
        return self.last(h)


class NowAndThen(Classifier):
    """No loss for every third batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return super().training_step(batch, batch_idx) if batch_idx % 3 != 1 else None


class LogsInForward(Classifier):
    """``self(x)`` is the only call, and it logs."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.net(x)
        self.log("inside", h.detach().norm(), batch_size=8)
        self.logger.log_metrics({"by hand": 1.0}, step=self.global_step)
        return h

    def loss(self, batch: Any) -> Tensor:
        return nnf.cross_entropy(self(batch[0]), batch[1])


class WithHooks(Classifier):
    """Watches its network with hooks of its own, and a meter that is no module."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.norms, self.meter = [], Meter()
        self.net[0].register_forward_hook(self._watch)

    def _watch(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.norms.append(output.detach().norm())
        self.meter.update(float(output.detach().mean()))


class Collecting(nn.Module):
    """Hooks itself up in its first forward, and works with what the hooks collect, as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh())
        self.head = nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "collected"):
            self.collected: list[Tensor] = []
            for layer in (self.body[0], self.body[2]):
                layer.register_forward_hook(lambda module, args, output: self.collected.append(output))
        self.collected.clear()
        self.body(x)
        return self.head(torch.cat(self.collected, -1))


class Meter:
    """A running average as people write it."""

    def __init__(self) -> None:
        self.total, self.count, self.values = 0.0, 0, []

    def update(self, value: float) -> None:
        self.total, self.count = self.total + value, self.count + 1
        self.values.append(value)


class MaxNorm(nn.Linear):
    """Keeps its rows short, in the forward, as networks for EEG do."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.5)
        self.bias.data.clamp_(-0.02, 0.02)
        return super().forward(x)


def constrained() -> nn.Sequential:
    return nn.Sequential(MaxNorm(8, 12), nn.ReLU(), MaxNorm(12, CLASSES))


def parametrized() -> nn.Sequential:
    """Spectral normalization iterates on buffers in every training forward."""
    normed = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 12))
    return nn.Sequential(normed, nn.ReLU(), nn.Linear(12, CLASSES))


class GradientPenalty(Classifier):
    """Differentiates twice."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        x.requires_grad_()
        logits = self.net(x)
        (slope,) = torch.autograd.grad(logits.square().sum(), x, create_graph=True)
        return nnf.cross_entropy(logits, y) + 0.01 * slope.square().mean()


class SetsRates(EncoderThenHead):
    """Warms up by hand, clears gradients and steps a schedule of its own, all in the training step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = 0.01 * (1 + self.global_step)
            group["used"] = [*group.get("used", ()), group["lr"]]
            group[f"rate {self.global_step}"] = group["lr"]
        return super().training_step(batch, batch_idx)


class StepsScheduler(EncoderThenHead):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.lr_schedulers().step()
        return super().training_step(batch, batch_idx)


class ClearsGradients(EncoderThenHead):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.optimizers().zero_grad()
        return super().training_step(batch, batch_idx)


class Experts(nn.Module):
    """Only one of the experts is called, another one every time."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 12)
        self.experts = nn.ModuleList([nn.Linear(12, 12) for _ in range(3)])
        self.calls = 0
        self.last = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        expert = self.experts[self.calls % 3]
        self.calls += 1
        return self.last(expert(self.first(x)).relu())


class Recurrent(nn.Module):
    """Called in a loop over time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.rnn = nn.Linear(8 + 6, 6), nn.LSTM(6, 6, num_layers=2, dropout=0.2, batch_first=True)
        self.last = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 6)
        states = []
        for _ in range(3):
            h = self.cell(torch.cat([x, h], 1)).tanh()
            states.append(h)
        return self.last(self.rnn(torch.stack(states, 1))[0][:, -1])


def fit(
    module: pl.LightningModule,
    data: Iterable[Any],
    callbacks: list[pl.Callback],
    logger: Any = False,
    validate: Iterable[Any] | None = None,
    ckpt_path: Any = None,
    **trainer: Any,
) -> pl.Trainer:
    """Train on the CPU without a word; the trainer."""
    settings = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
    }
    runner = pl.Trainer(**{**settings, "callbacks": callbacks, "logger": logger, **trainer})
    runner.fit(module, data, validate, ckpt_path=ckpt_path)
    return runner
