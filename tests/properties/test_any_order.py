"""Whatever happens to a training loop, in any order: with a monitor it is the same loop, bit for bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch.nn.utils import prune

from spectral_monitor import SpectralProbe
from tests.endurance.endure import hooks
from tests.properties.twins import LAYERS, OBSERVED, PLACES, Loop, Saved

seeds = st.integers(0, 1000)
layers = st.sampled_from(LAYERS)
WATCHED: dict[str, dict[str, Any]] = {
    "standard": {"mode": "warn"},
    "full": {"mode": "observe", "quantities": "full", "drift_every": 1},
    "some": {"mode": "observe", "every_n_steps": {"light": 2, "standard": 3}, "replay_samples": 2},
    "frugal": {"mode": "observe", "low_memory": True, "max_overhead": 0.5, "history": 2},
    "corrected": OBSERVED,
}


class AnyOrder(RuleBasedStateMachine):
    """Two loops that are told the same."""

    @initialize(options=st.sampled_from(sorted(WATCHED)))
    def begin(self, options: str) -> None:
        self.plain, self.watched = self.loops = Loop(), Loop(WATCHED[options])
        self.every = options in ("standard", "full", "corrected")
        self.saved: list[tuple[Saved, Saved]] = []
        self.stale: set[str] = set()  # layers that are not what they were when the probe was made
        self.open = False  # a step has begun that nobody has ended

    # --- steps

    @rule(seed=seeds, kind=st.sampled_from(["plain", "accumulated", "closure", "scaled"]), look=st.booleans())
    def step(self, seed: int, kind: str, look: bool) -> None:
        before, self.open = self.plain.weights(), False
        assert [loop.step(seed, kind, look=look) for loop in self.loops] == ["", ""]
        if self.every:
            self.check(before, self.plain.weights())

    @rule(seed=seeds, place=st.sampled_from(PLACES))
    def fail(self, seed: int, place: str) -> None:
        self.open = False
        assert [loop.step(seed, place=place) for loop in self.loops] == ["" if place == "sink" else place] * 2

    @rule(seed=seeds)
    def overflow(self, seed: int) -> None:
        before, self.open = self.plain.weights(), False
        assert [loop.step(seed, "scaled", overflow=True) for loop in self.loops] == ["", ""]
        after = self.plain.weights()
        assert all(torch.equal(before[name], after[name]) for name in LAYERS), "the scaler skips such a step"
        if self.every:
            newest = self.watched.probe.latest
            assert newest.step == self.watched.steps
            assert all(math.isnan(newest.value("update_norm", info.name)) for info in newest.layers)

    @rule()
    def leave_open(self) -> None:
        self.open = True
        for loop in self.loops:
            with loop.alone():
                loop.leave_open()

    @rule()
    def evaluate(self) -> None:
        for loop in self.loops:
            with loop.alone():
                loop.evaluate()

    # --- changes

    @rule(name=layers)
    def freeze_or_thaw(self, name: str) -> None:
        for loop in self.loops:
            layer = getattr(loop.model, name)
            layer.requires_grad_(not next(layer.parameters()).requires_grad)

    @rule(name=layers, amount=st.sampled_from([0.3, 0.6]))
    def prune(self, name: str, amount: float) -> None:
        self.stale.add(name)
        for loop in self.loops:
            with loop.alone():
                prune.random_unstructured(getattr(loop.model, name), "weight", amount=amount)

    @rule(name=layers)
    def settle(self, name: str) -> None:
        """Make the pruning last; the parameter stays the optimizer's."""
        for loop in self.loops:
            layer = getattr(loop.model, name)
            if prune.is_pruned(layer):
                self.stale.add(name)
                prune.remove(layer, "weight")

    @rule(lr=st.sampled_from([0.0, 0.003, 0.1]))
    def change_the_rate(self, lr: float) -> None:
        for loop in self.loops:
            loop.optimizer.param_groups[0]["lr"] = lr

    # --- checkpoints

    @rule()
    def save(self) -> None:
        self.saved.append((self.plain.save(), self.watched.save()))

    @precondition(lambda self: self.saved)
    @rule(data=st.data(), probe_first=st.booleans())
    def resume(self, data: st.DataObject, probe_first: bool) -> None:
        pair = data.draw(st.sampled_from(self.saved))
        for loop, saved in zip(self.loops, pair, strict=True):
            loop.resume(saved, probe_first)
        self.stale, self.open = set(), False
        assert self.watched.probe.steps == self.watched.steps

    # --- monitors

    @precondition(lambda self: not self.open)
    @rule()
    def another_probe(self) -> None:
        """In the place of the first one, of which nobody takes leave."""
        steps = self.watched.steps
        with self.watched.alone():
            self.watched.watch()
            self.watched.probe.resume_at(steps)
        self.stale = set()

    @rule(quantities=st.sampled_from(["light", "standard"]))
    def second(self, quantities: str) -> None:
        """Beside the first one, or no more."""
        if self.watched.second is None:
            with self.watched.alone():
                self.watched.second = SpectralProbe(
                    self.watched.model, self.watched.optimizer, quantities=quantities, every_n_steps=2, mode="observe"
                )
        else:
            self.watched.second = None

    @rule()
    def look(self) -> None:
        probe = self.watched.probe
        with self.watched.alone():
            assert probe.role_table()
            assert repr(probe)
            if probe.latest is not None:
                assert probe.table()

    # --- what always holds

    @invariant()
    def training_is_the_same(self) -> None:
        one, other = (loop.record() for loop in self.loops)
        paths = [path for path in {**one, **other} if not (self.open and path.startswith("hooks/"))]
        assert [path for path in paths if one.get(path, "absent") != other.get(path, "absent")] == []

    @invariant()
    def what_is_missing_has_a_reason(self) -> None:
        for m in list(self.watched.probe.measurements)[-1:]:
            silent = [
                f"{key}/{info.name}"
                for key, column in m.values.items()
                for info, value in zip(m.layers, column.tolist(), strict=True)
                if math.isnan(value) and not m.why(key, info.name)
            ]
            assert silent == []
            assert [key for key, value in m.summary.items() if math.isnan(value) and not m.why(key, "summary")] == []

    @invariant()
    def nothing_goes_wrong(self) -> None:
        assert [text for text in self.watched.said if "failed" in text] == []

    def check(self, before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> None:
        """The step was measured, and the sizes of its update are those that the other loop has made."""
        newest = self.watched.probe.latest
        assert newest is not None
        assert newest.step == self.watched.steps
        names = {info.name for info in newest.layers}
        for name in set(LAYERS) & names - self.stale:
            assert newest.value("weight_fro", name) == pytest.approx(float(before[name].norm()), rel=1e-4)
            moved, found = float((after[name] - before[name]).norm()), newest.value("update_fro", name)
            assert found == pytest.approx(moved, rel=1e-3, abs=1e-7) or (moved == 0 and math.isnan(found)), name

    def teardown(self) -> None:
        if not hasattr(self, "loops"):
            return
        probe = self.watched.probe
        with self.watched.alone():
            probe.abandon_step()
            probe.close()
        left, own = (hooks(loop.model, loop.optimizer) for loop in self.loops)
        assert left == own, "those of pruning"


# The quick profile tries 13 runs of a loop, the other one 200.
AnyOrder.TestCase.settings = settings(max_examples=settings().max_examples // 3, stateful_step_count=20)
TestAnyOrder = AnyOrder.TestCase
