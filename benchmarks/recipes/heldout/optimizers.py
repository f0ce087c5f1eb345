"""Optimizers that torch does not have, as their public packages write them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from benchmarks.recipes.heldout.data import Groups, Supervised
from benchmarks.recipes.run import Run


class Lion(Optimizer):
    """Signs of a mixture of gradient and momentum."""

    def __init__(
        self,
        params: Groups | Iterable[Tensor],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None if closure is None else closure()
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
                p.sub_(average.lerp(p.grad, 1 - beta1).sign_(), alpha=group["lr"])
                average.lerp_(p.grad, 1 - beta2)
        return loss


class AdamWScheduleFree(Optimizer):
    """AdamW with averaged weights instead of a schedule; the weights between steps are those of gradients."""

    def __init__(
        self,
        params: Groups | Iterable[Tensor],
        lr: float = 0.0025,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "warmup_steps": warmup_steps,
            "k": 0,
            "weight_sum": 0.0,
            "lr_max": 0.0,
        }
        super().__init__(params, defaults)

    def averages(self) -> list[tuple[Tensor, Tensor]]:
        """Parameters and the averages that are to be evaluated in their place."""
        found = []
        for group in self.param_groups:
            beta1 = group["betas"][0]
            found += [(p, p.detach().lerp(self.state[p]["z"], 1 - 1 / beta1)) for p in group["params"] if self.state[p]]
        return found

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            group["k"] += 1
            k = group["k"]
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
                z, second = state["z"], state["exp_avg_sq"]
                second.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                direction = p.grad / (second / (1 - beta2**k)).sqrt().add_(group["eps"])
                direction.add_(p, alpha=group["weight_decay"])
                p.lerp_(z, share)
                p.add_(direction, alpha=lr * (beta1 * (1 - share) - 1))
                z.sub_(direction, alpha=lr)
        return loss


def sharpness_aware(task: Supervised, rho: float) -> Callable[[Run], None]:
    """Take gradients where the loss within a radius is highest, as SAM does, from the same batch again."""

    def clear(run: Run) -> None:
        for optimizer in run.optimizers:
            optimizer.zero_grad()

    def update(run: Run) -> None:
        if run.zero_grad:
            clear(run)
        state = task.generator.get_state()
        run.loss().backward()
        with torch.no_grad():
            moved = [p for group in run.groups() for p in group["params"] if p.grad is not None]
            norm = torch.stack([p.grad.norm() for p in moved]).norm() + 1e-12
            before = [p.clone() for p in moved]
            for p in moved:
                p.add_(p.grad * (rho / norm))
        if run.zero_grad:
            clear(run)
        task.generator.set_state(state)
        run.loss().backward()
        with torch.no_grad():
            for p, old in zip(moved, before, strict=True):
                p.copy_(old)
        run.clip_gradients()
        for _ in range(run.repeats):
            for optimizer in run.optimizers:
                optimizer.step()

    return update
