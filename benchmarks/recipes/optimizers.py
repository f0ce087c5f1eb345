"""Optimizers that PyTorch lacks, written down briefly under the names of the public packages."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.recipes.run import Run


class Lion(Optimizer):
    """Step by the sign of an interpolated momentum, with decoupled weight decay (Chen et al., 2023)."""

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                average = state["exp_avg"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(average.lerp(p.grad, 1 - beta1).sign_(), alpha=-group["lr"])
                average.lerp_(p.grad, 1 - beta2)
        return None


class AdamWScheduleFree(Optimizer):
    """Average AdamW's iterates instead of decaying its rate (Defazio et al., 2024).

    Parameters hold the point at which gradients are taken; :meth:`eval` puts the average in their place and
    :meth:`train` undoes that.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict],
        lr: float = 0.0025,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "warmup_steps": warmup_steps, "k": 0, "weight_sum": 0.0, "lr_max": 0.0})

    def eval(self) -> None:
        self._interpolate(lambda beta1: 1 - 1 / beta1)

    def train(self) -> None:
        self._interpolate(lambda beta1: 1 - beta1)

    @torch.no_grad()
    def _interpolate(self, share: Callable[[float], float]) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], share(group["betas"][0]))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            k = group["k"] = group["k"] + 1
            lr = group["lr"] * min(1.0, k / max(1, group["warmup_steps"]))
            group["lr_max"] = max(lr, group["lr_max"])
            weight = group["lr_max"] ** 2
            group["weight_sum"] += weight
            share = weight / group["weight_sum"] if group["weight_sum"] else 0.0
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["z"], state["exp_avg_sq"] = p.clone(), torch.zeros_like(p)
                second = state["exp_avg_sq"]
                second.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                direction = p.grad / (second / (1 - beta2**k)).sqrt_().add_(group["eps"])
                direction.add_(p, alpha=group["weight_decay"])
                p.lerp_(state["z"], share).add_(direction, alpha=lr * (beta1 * (1 - share) - 1))
                state["z"].sub_(direction, alpha=lr)
        return None


def averaged(optimizer: AdamWScheduleFree, evaluate: Callable[[], float]) -> Callable[[], float]:
    """Evaluate at the averages and put the parameters back as they were, to the bit."""

    @torch.no_grad()
    def evaluation() -> float:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        before = [p.clone() for p in parameters]
        optimizer.eval()
        figure = evaluate()
        for p, old in zip(parameters, before, strict=True):
            p.copy_(old)
        return figure

    return evaluation


def sharpness_aware(generator: torch.Generator, rho: float = 0.05) -> Callable[[Run], None]:
    """Make an update that steps by the gradient at the worst point near the weights (SAM; Foret et al., 2021).

    Args:
        generator: of the batches; rewound, so that both gradients are of the same one.
        rho: distance to the worst point.
    """

    def update(run: Run) -> None:
        parameters = [p for group in run.groups() for p in group["params"]]
        if run.zero_grad:
            clear(run)
        before = generator.get_state()
        run.loss().backward()
        moved = [p for p in parameters if p.grad is not None]
        old = [p.detach().clone() for p in moved]
        with torch.no_grad():
            scale = rho / (norm(moved) + 1e-12)
            for p in moved:
                p.add_(p.grad * scale)
        clear(run)
        generator.set_state(before)
        run.loss().backward()
        with torch.no_grad():
            for p, values in zip(moved, old, strict=True):
                p.copy_(values)
        run.clip_gradients()
        for _ in range(run.repeats):
            for optimizer in run.optimizers:
                optimizer.step()

    return update


def clear(run: Run) -> None:
    for optimizer in run.optimizers:
        optimizer.zero_grad()


def norm(parameters: list[nn.Parameter]) -> Tensor:
    return torch.stack([p.grad.norm() for p in parameters]).norm()
