"""Reinforcement learning: PPO balances a pole, with manual optimization; the environment is written out here.

An agent gathers its own data, takes many steps on each batch, and has two networks, of which the actor's loss says
little. So what the monitor shows is more useful than the loss: how far steps move each layer of each network.

python examples/reinforcement_learning.py
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator

import lightning as pl
import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, IterableDataset

from spectral_monitor.callbacks import SpectralMonitor

POLES, HORIZON, LONGEST = 32, 64, 200
DISCOUNT, TRACE, CLIP, EPOCHS, MINIBATCH = 0.98, 0.95, 0.2, 4, 512


class Poles:
    """Many carts with a pole each (Barto, Sutton and Anderson, 1983); 1 is earned for every step that a pole stands."""

    def __init__(self) -> None:
        self.state, self.age = self._fresh(POLES), torch.zeros(POLES)

    def step(self, push: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Push each cart, 0 left and 1 right; return which poles fell, which have stood long enough, and their ages."""
        _, v, angle, spin = self.state.unbind(-1)
        force = 20.0 * push - 10.0
        swing = (force + 0.05 * spin.square() * angle.sin()) / 1.1
        turn = (9.8 * angle.sin() - angle.cos() * swing) / (0.5 * (4 / 3 - 0.1 * angle.cos().square() / 1.1))
        pull = swing - 0.05 * turn * angle.cos() / 1.1
        change = torch.stack([v, pull, spin, turn], -1)
        self.state, self.age = self.state + 0.02 * change, self.age + 1
        fell = (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > math.radians(12))
        done, age = fell | (self.age >= LONGEST), self.age
        self.state = torch.where(done[:, None], self._fresh(POLES), self.state)
        self.age = torch.where(done, 0.0, self.age)
        return fell, done, age

    @staticmethod
    def _fresh(count: int) -> Tensor:
        return 0.1 * torch.rand(count, 4) - 0.05


class Experience(IterableDataset[tuple[Tensor, ...]]):
    """What the agent lives through: in each round of :data:`HORIZON` steps a batch, made with the actor of now."""

    def __init__(self, agent: PPO, rounds: int) -> None:
        self.agent, self.rounds, self.ages = agent, rounds, [0.0]

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        """Yield states, actions, log-probabilities, advantages and returns, of all poles and steps."""
        poles, agent = Poles(), self.agent
        for _ in range(self.rounds):
            states, actions, logs, values, ends = [], [], [], [], []
            for _ in range(HORIZON):
                policy, value = agent.policy(poles.state), agent.critic(poles.state)[:, 0]
                action = policy.sample()
                states, actions, values = [*states, poles.state], [*actions, action], [*values, value]
                logs.append(policy.log_prob(action))
                _, done, age = poles.step(action)
                ends.append(done)
                self.ages = [*self.ages, *age[done].tolist()][-100:]
            value = torch.stack([*values, agent.critic(poles.state)[:, 0]])
            advantage = advantages(value, torch.stack(ends))
            parts = (torch.stack(states), torch.stack(actions), torch.stack(logs), advantage, advantage + value[:-1])
            yield tuple(part.flatten(0, 1) for part in parts)


def advantages(values: Tensor, ends: Tensor) -> Tensor:
    """Return how much better each step was than expected (generalized advantage estimation), where each earns 1.

    Args:
        values: (steps + 1, poles) what the critic expects from each state on.
        ends: (steps, poles) whether a step ended an episode.
    """
    found, gained = [], torch.zeros_like(values[0])
    for t in reversed(range(len(ends))):
        goes_on = (~ends[t]).to(values)
        gained = 1 + DISCOUNT * goes_on * values[t + 1] - values[t] + DISCOUNT * TRACE * goes_on * gained
        found.append(gained)
    return torch.stack(found[::-1])


class PPO(pl.LightningModule):
    """Proximal policy optimization (Schulman et al., 2017): an actor and a critic, each with an optimizer."""

    def __init__(self, width: int = 64, lr: float = 1e-3) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.lr = lr
        self.actor, self.critic = (
            nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, outputs))
            for outputs in (2, 1)
        )

    def policy(self, states: Tensor) -> Categorical:
        return Categorical(logits=self.actor(states))

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(net.parameters(), lr=self.lr) for net in (self.actor, self.critic)]

    def training_step(self, batch: tuple[Tensor, ...], index: int) -> None:
        for _ in range(EPOCHS):
            for chosen in torch.randperm(len(batch[0])).split(MINIBATCH):
                states, actions, logs, advantages, returns = (part[chosen] for part in batch)
                advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
                ratio = (self.policy(states).log_prob(actions) - logs).exp()
                clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
                gain = torch.minimum(ratio * advantages, clipped * advantages).mean()
                error = mse_loss(self.critic(states)[:, 0], returns)
                for optimizer, loss in zip(self.optimizers(), (-gain, error), strict=True):
                    optimizer.zero_grad()
                    self.manual_backward(loss)
                    optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--lr", type=float, default=1e-3, help="0.1 is too large, and is named")
    args = parser.parse_args()
    pl.seed_everything(0, verbose=False)
    agent = PPO(lr=args.lr)
    experience = Experience(agent, args.rounds)
    monitor = SpectralMonitor(every_n_steps="1, 2, 4, ..., every 100")
    quiet = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "logger": False,
    }
    trainer = pl.Trainer(max_epochs=1, callbacks=[monitor], accelerator="cpu", **quiet)
    trainer.fit(agent, DataLoader(experience, batch_size=None))
    print(f"poles stood for {sum(experience.ages) / len(experience.ages):.0f} of {LONGEST} steps, the last 100 of them")


if __name__ == "__main__":
    main()
