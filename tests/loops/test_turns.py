"""Optimizers that take turns are measured in turn, whatever the interval."""

from __future__ import annotations

import math

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from spectral_monitor import SpectralMonitor, SpectralProbe
from spectral_monitor.engine import CLEARED, TURN, Engine, still_due
from spectral_monitor.engine.overhead_budget import Budget
from spectral_monitor.engine.schedule import MAX_WAIT_STEPS
from spectral_monitor.measurement import HEALTHY, NOT_STEPPED
from spectral_monitor.reporting.content.headline import headline


class Pair(nn.Module):
    """Two networks that train each other, each with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6))
        self.critic = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return what the critic says of what the maker makes."""
        return self.critic(self.maker(x))


def measured(probe: SpectralProbe) -> list[tuple[int, str]]:
    """Return the steps that were measured, each with the network that was seen to step."""
    found = []
    for measurement in probe.measurements:
        seen = {
            info.name.split(".")[0]
            for info, size in zip(measurement.layers, measurement.values["update_norm"], strict=True)
            if math.isfinite(size) and size > 0
        }
        found.append((measurement.step, "+".join(sorted(seen))))
    return found


def run(every: int | str, steps: int, turn: int, phase: int = 0, quantities: str = "light") -> SpectralProbe:
    """Train a pair; the maker steps in one of ``turn`` steps, the critic in the others."""
    torch.manual_seed(0)
    pair = Pair()
    maker, critic = torch.optim.Adam(pair.maker.parameters()), torch.optim.SGD(pair.critic.parameters(), lr=0.01)
    probe = SpectralProbe(pair, [critic, maker], every_n_steps=every, quantities=quantities, verbose=False)
    for step in range(1, steps + 1):
        with probe.step():
            optimizer = maker if step % turn == phase else critic
            pair.zero_grad()
            pair(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    return probe


def test_who_waits_for_its_turn_keeps_its_state() -> None:
    probe = run(4, 16, turn=2, phase=1)
    assert "not judged" not in headline(probe.latest)
    assert {state.state for state in probe.latest.states.values()} == {HEALTHY}


def test_who_gets_no_turn_any_more_is_not_judged() -> None:
    probe = run(4, 60, turn=40)
    assert measured(probe)[-1][1] == "critic"
    found = {name.split(".")[0]: str(state) for name, state in probe.latest.states.items()}
    assert found == {"maker": f"not judged: {NOT_STEPPED}", "critic": HEALTHY}


def test_even_steps_meet_both_of_two() -> None:
    assert measured(run(4, 12, turn=2, phase=1)) == [
        (4, "critic"),
        (5, "maker"),
        (8, "critic"),
        (9, "maker"),
        (12, "critic"),
    ]


def test_one_that_steps_rarely_is_waited_for() -> None:
    found = measured(run(10, 60, turn=5, phase=3))
    assert found == [
        (10, "critic"),
        (13, "maker"),
        (20, "critic"),
        (23, "maker"),
        (30, "critic"),
        (33, "maker"),
        (40, "critic"),
        (43, "maker"),
        (50, "critic"),
        (53, "maker"),
        (60, "critic"),
    ]


def test_every_step_that_is_due_is_measured() -> None:
    assert [step for step, _ in measured(run(1, 9, turn=3))] == list(range(1, 10))


def test_features_of_the_one_that_waited_are_its_own_step_s() -> None:
    probe = run(4, 6, turn=2, phase=1, quantities="standard")
    first, second, *_ = probe.measurements
    first_of_maker = [info.name for info in first.layers].index("maker.0")
    assert first.values["feature_change"][first_of_maker] == 0
    assert second.values["feature_change"][first_of_maker] > 0


def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[frozenset[str]] = []
    arm = Engine.arm
    monkeypatch.setattr(
        Engine, "arm", lambda self, keys, *more: (watched.append(frozenset(keys)), arm(self, keys, *more))[1]
    )
    found = measured(run(100, 3 * 100, turn=10**6))
    assert found == [(100, "critic"), (200, "critic"), (300, "critic")]
    assert sum(TURN in keys for keys in watched) == MAX_WAIT_STEPS
    assert len(watched) == MAX_WAIT_STEPS + 3


def test_an_absent_one_is_waited_for_again_once_it_was_seen() -> None:
    torch.manual_seed(0)
    pair = Pair()
    maker, critic = torch.optim.Adam(pair.maker.parameters()), torch.optim.SGD(pair.critic.parameters(), lr=0.01)
    probe = SpectralProbe(pair, [critic, maker], every_n_steps=50, quantities="light", verbose=False)
    for step in range(1, 220):
        with probe.step():
            pair.zero_grad()
            pair(torch.randn(8, 4)).square().mean().backward()
            (maker if step >= 150 and step % 5 in (0, 3) else critic).step()
    assert measured(probe) == [
        (50, "critic"),
        (100, "critic"),
        (150, "maker"),
        (151, "critic"),
        (200, "maker"),
        (201, "critic"),
    ]


@pytest.mark.parametrize(
    ("due", "pending", "both"),
    [
        ({"lr"}, set(), {"lr"}),
        (set(), {"lr"}, {"lr"}),
        ({"lr", TURN}, set(), {"lr", TURN}),
        ({"lr", TURN}, {"lr", TURN}, {"lr", TURN}),
        ({"lr"}, {"update_norm", TURN}, {"lr", "update_norm"}),
        ({"lr", TURN}, {"update_norm"}, {"lr", "update_norm"}),
        ({"lr", TURN}, {CLEARED}, {"lr", TURN, CLEARED}),
    ],
)
def test_what_is_due_does_not_wait_for_a_turn(due: set[str], pending: set[str], both: set[str]) -> None:
    assert still_due(frozenset(due), frozenset(pending)) == both


def test_a_turn_waits_until_the_budget_affords_it(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = Budget(0.01)
    assert budget.affords(101)
    for step in (1, 2, 3, 200):
        budget.begin(step)
        budget.measured(step, 1e-9)
    monkeypatch.setattr(Budget, "_spacing", 40.0)
    assert not budget.affords(239)
    assert budget.affords(240)


class Turns(L.LightningModule):
    """The same under Lightning, with manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.pair = Pair()

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        critic, maker = self.optimizers()
        optimizer = maker if batch_idx % 2 == 0 else critic  # batches are counted from 1: the maker's are odd
        optimizer.zero_grad()
        self.manual_backward(self.pair(batch).square().mean())
        optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.SGD(self.pair.critic.parameters(), lr=0.01),
            torch.optim.Adam(self.pair.maker.parameters()),
        ]


@pytest.mark.parametrize("every", [2, 4])
def test_under_lightning(every: int) -> None:
    torch.manual_seed(0)
    monitor = SpectralMonitor(every_n_steps=every, quantities="light", verbose=False)
    trainer = L.Trainer(
        max_steps=-1, max_epochs=1, callbacks=[monitor], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
    )  # fmt: skip
    trainer.fit(Turns(), torch.utils.data.DataLoader(torch.randn(128, 4), batch_size=4))
    steps = [measurement.step for measurement in monitor.measurements]
    assert steps == sorted({*range(every, 33, every), *range(every + 1, 33, every)})
