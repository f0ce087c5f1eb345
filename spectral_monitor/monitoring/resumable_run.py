"""A run whose training loop saves and loads its state."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from spectral_monitor.arguments import is_integer
from spectral_monitor.engine import Engine
from spectral_monitor.messages import SpectralMonitorWarning
from spectral_monitor.monitoring.live_run import LiveRun
from spectral_monitor.monitoring.supervisor import Supervisor


class ResumableRun(LiveRun):
    """A live run in a process that may begin in the middle of training.

    Attributes:
        steps: optimizer steps taken so far, those before this process included.
    """

    _engine: Engine
    _supervisor: Supervisor
    _begun = False
    steps = 0
    rank = 0

    @property
    def is_first(self) -> bool:
        """True in the process that warns for all."""
        return self.rank == 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from in another process: plain types and CPU tensors, shared, not copied.

        It holds the weights that drift is counted from, the batch that ``feature_drift`` is measured on, and counters,
        but no measurements. ``torch.load(..., weights_only=True)`` reads it. Each of several processes must save its
        own state.
        """
        state = {**self._engine.state(), "oversight": self._supervisor.state_dict()}
        return {"steps": self.steps, "state": state, "tensors": self._engine.tensors()}

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Resume from a state, in all processes, after the model has its weights back.

        A warning names what has to start again, such as ``feature_drift`` if the batch held more than tensors,
        containers and numbers.

        Args:
            state: the state that this process saved; if the number of processes has changed, those of all, by rank.

        Raises:
            ValueError: the state has other layers, which are named, or another version; nothing has changed then.
        """
        states = [state] if isinstance(state, Mapping) else list(state)
        if not states:
            raise ValueError("load_state_dict got an empty list of states")
        for item in states:
            if not isinstance(item, Mapping) or not {"steps", "state", "tensors"} <= item.keys():
                raise ValueError("load_state_dict needs what state_dict() returned, with steps, state and tensors")
        local, tensors = self._engine.part_of(states)
        restarted = self._engine.restore(local["state"], tensors, int(local["steps"]))
        self.steps = int(local["steps"])
        self._begun = self.steps > 0
        if "oversight" in local["state"]:
            self._supervisor.load_state_dict(local["state"]["oversight"])
        if restarted and self.is_first:
            warnings.warn(f"resumed at step {self.steps}: {'; '.join(restarted)}", SpectralMonitorWarning, stacklevel=2)

    def resume_at(self, step: int) -> None:
        """Resume at a step without a state, in all processes: drift is counted from there.

        Args:
            step: optimizer steps taken so far.

        Raises:
            ValueError: ``step`` is no integer, or below 0.
        """
        if not is_integer(step, 0):
            raise ValueError(f"step must be an integer >= 0, the optimizer steps taken so far; got {step!r}")
        self._engine.start(step)
        self.steps, self._begun = step, True
