"""The monitor for plain PyTorch loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from typing import Literal

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from spectral_monitor.arguments import is_integer
from spectral_monitor.capture.unwrap import unwrap_model, unwrap_optimizers
from spectral_monitor.condition import SpectralCondition
from spectral_monitor.condition.optimizers.plans import LookAhead
from spectral_monitor.correction import LRCorrection
from spectral_monitor.correction.settings import with_loss
from spectral_monitor.engine import Engine, Settings
from spectral_monitor.engine.schedule import DEFAULT_SCHEDULE
from spectral_monitor.layers import Anatomy
from spectral_monitor.measurement import counted
from spectral_monitor.messages import WarnOnce, in_lines
from spectral_monitor.monitoring.reactions import OnVerdict
from spectral_monitor.monitoring.resumable_run import ResumableRun
from spectral_monitor.monitoring.settings import Mode, checked, with_needed
from spectral_monitor.monitoring.step_watch import StepWatch
from spectral_monitor.monitoring.supervisor import Supervisor
from spectral_monitor.reporting.sinks import Sink, Sinks, checked_sinks
from spectral_monitor.reporting.text.role_table import role_table
from spectral_monitor.reporting.text.roles import Roles
from spectral_monitor.sharding import check_same_weights, check_settings, fsdp1_wrapper, training_processes
from spectral_monitor.suggestions import helpful


class SpectralProbe(ResumableRun):
    """Measures optimizer steps of a bare training loop.

    Wrap the forward, the backward and the optimizer's step of an iteration in ``with probe.step():``. The steps of
    ``every_n_steps`` are measured; the others cost a comparison. Training does not change, except with
    ``mode="correct"``: parameters, optimizer state, gradients, buffers and random states are bit for bit the same.

    On several processes (DDP, FSDP1, FSDP2, tensor parallelism) make the probe in all of them, once the model is
    wrapped and sharded, and open its steps in all of them. Numbers are those of one process with the whole batch, and
    the same in all; the first process alone warns and gives them to sinks.

    To resume, save :meth:`state_dict` with the model's and the optimizer's, and load it after them.

    Args:
        model: the module that is trained; call it once per step (call its parts instead, and what needs the
            features after the step is NaN). Wrappers of Fabric, ``DistributedDataParallel`` and
            ``FullyShardedDataParallel`` will do.
        optimizer: its optimizer, or several; Fabric's and Accelerate's wrappers will do.
        every_n_steps, quantities, include, exclude, roles, blocks, heads, nodes, max_rows, replay_samples, tol: as for
            :class:`~spectral_monitor.SpectralMonitor`.
        drift_every, history, condition, correction, low_memory, max_overhead, on_verdict: as there.
        mode: as there; ``"correct"`` corrects the learning rates of steps inside ``probe.step()``.
        sinks: receive every measurement, such as a :class:`~spectral_monitor.reporting.TensorBoardSink`;
            :meth:`close` closes them when training is over.
        stop_on: cause, or causes, such as ``["diverged", "exploding"]``, at which :attr:`should_stop` becomes true, in
            all processes at once; ``"any"`` for all.
        data_parallel_rank: the number of the batch this process gets, where some processes share one, as under tensor
            parallelism; by default each process gets its own.
        verbose: whether the first process prints a line on each notable correction.

    Attributes:
        should_stop: whether a verdict of ``stop_on`` has begun; leave the loop then.
        rank: of this process.
        processes: the number that train together.

    Raises:
        ValueError: an argument out of range, an unknown key, a pattern that matches nothing, a role or number of
            blocks that does not fit, LBFGS with feature quantities; on several processes, models or weights that
            differ, unknown placements, tensor parallelism without ``data_parallel_rank``.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> probe = SpectralProbe(model, optimizer, every_n_steps=1)
        >>> for _ in range(3):
        ...     with probe.step():
        ...         optimizer.zero_grad()
        ...         model(torch.randn(16, 4)).square().mean().backward()
        ...         optimizer.step()
        >>> probe.latest.step
        3
        >>> probe.latest.value("update_ratio", "0") > 0
        True
    """

    @helpful
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        every_n_steps: int | str | Mapping[str, int | str] = DEFAULT_SCHEDULE,
        quantities: str | Sequence[str] = "standard",
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        roles: Mapping[str, str] | None = None,
        blocks: Mapping[str, int] | None = None,
        heads: Mapping[str, int] | None = None,
        nodes: Sequence[str] | None = None,
        max_rows: int | None = 512,
        replay_samples: int | Literal["auto"] | None = "auto",
        tol: float = 0.05,
        drift_every: int = 5,
        history: int = 1000,
        condition: SpectralCondition = SpectralCondition(),
        correction: LRCorrection | None = None,
        mode: Mode = "warn",
        sinks: Sequence[Sink] = (),
        low_memory: bool = False,
        max_overhead: float | Literal["auto"] | None = "auto",
        on_verdict: OnVerdict | None = None,
        stop_on: str | Sequence[str] = (),
        data_parallel_rank: int | None = None,
        verbose: bool = True,
    ) -> None:
        self.should_stop = False
        sinks = checked_sinks(sinks)
        correction = checked(mode, condition, correction)
        settings = Settings(
            every_n_steps=every_n_steps,
            quantities=with_needed(quantities, correction),
            include=include,
            exclude=exclude,
            roles=roles,
            blocks=blocks,
            heads=heads,
            nodes=nodes,
            max_rows=max_rows,
            replay_samples=with_loss(replay_samples, correction),
            tol=tol,
            drift_every=drift_every,
            history=history,
            low_memory=low_memory,
            max_overhead=max_overhead,
        )
        super().__init__(settings, on_verdict, stop_on)
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        optimizers = unwrap_optimizers(optimizer, model)
        processes = training_processes(model, data_parallel_rank)
        if processes is not None:
            options = {field.name: getattr(settings, field.name) for field in fields(settings) if field.init}
            check_settings({**options, "mode": mode, "correction": correction}, processes)
        self.rank, self.processes = (0, 1) if processes is None else (processes.rank, processes.size)
        self._warn = WarnOnce(silent=not self.is_first)
        self._verbose = verbose and self.is_first
        self._sinks = Sinks(sinks if self.is_first else (), self._warn)
        module = unwrap_model(model)
        wrapper = fsdp1_wrapper(model, module)
        self._engine = Engine(module, optimizers, settings, processes, wrapper, corrected=mode == "correct")
        if processes is not None:
            check_same_weights(self._engine.replicated(), processes)
        self._supervisor = Supervisor(mode, condition, correction, self._engine)
        self._engine.start()
        self._watch = StepWatch(self._engine, optimizer, asks_for_loss=mode != "correct")
        self._open = self._unentered = False

    @property
    def anatomy(self) -> Anatomy:
        """The parts of the model."""
        return self._engine.anatomy

    @property
    def multipliers(self) -> dict[str, float]:
        """Layer -> factor on its learning rate; empty without a correction."""
        return self._supervisor.multipliers

    def param_groups_code(self) -> str:
        """Return Python code that makes the optimizers with corrected learning rates; empty without a correction."""
        return self._supervisor.param_groups_code()

    def role_table(self) -> str:
        """Return a table of layers and their roles, and of parameters that are not measured and why."""
        return role_table(self.anatomy)

    def roles(self) -> Roles:
        """Return every measured layer with its role, and the parameters that are not measured."""
        return Roles.of(self.anatomy)

    def step(self, *, accumulated: int = 1) -> AbstractContextManager[None]:
        """Return the ``with`` block around forward, backward and ``optimizer.step()`` of one iteration.

        Args:
            accumulated: number of micro-batches that gradients are accumulated over, by which the loss was divided;
                features are those of the last one.

        Raises:
            ValueError: ``accumulated`` is no integer, or below 1.
            RuntimeError: another correction already works on the optimizer.
        """
        if not is_integer(accumulated, 1):
            raise ValueError(f"accumulated must be a number of micro-batches, an integer >= 1, got {accumulated!r}")
        if self._unentered:
            self._warn(
                "probe.step() measures its block: put forward, backward and optimizer.step() inside `with "
                "probe.step():`"
            )
        self._unentered = True
        return self._block(accumulated)

    @contextmanager
    def _block(self, accumulated: int) -> Iterator[None]:
        try:
            self.begin_step()
            yield
        except BaseException:
            self.abandon_step()
            raise
        self.end_step(accumulated=accumulated)

    def begin_step(self) -> None:
        """Begin a step that is not a block of code, as in callbacks of a trainer; :meth:`end_step` ends it."""
        self._unentered = False
        if self._open:
            self.abandon_step()
        if not self._begun:
            self._begun = True
            if self._supervisor.rescale():
                self._engine.start()
            if self._supervisor.decision:
                self._say(self._supervisor.decision)
        self.steps, self._open = self.steps + 1, True
        due = self._supervisor.due(self.steps, self._warn)
        self._supervisor.arm()
        self._watch.begin(due)

    def report_loss(self, loss: Tensor, again: Callable[[], Tensor] | None = None) -> None:
        """Report the loss on which ``backward`` is called in this step; not needed where the model returns it.

        It makes ``summary/loss_distance`` known, and shows verdicts whether targets are far too large. Where gradients
        are accumulated, it may be called for each micro-batch.

        Args:
            loss: a scalar tensor.
            again: computes the loss once more, of the same batch, before it is divided by the number of micro-batches.
                It makes ``summary/loss_change`` and ``summary/edge`` known, from the second measured step with features
                on. A correction uses it now and then, and shortens steps that go too far. It is not needed where the
                model returns the loss. Where gradients are accumulated, each micro-batch needs its own.

        Raises:
            ValueError: the loss is not a scalar.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError(f"report_loss needs the scalar tensor on which backward is called, got {loss!r}")
        self._watch.report_loss(loss, again)

    def report_schedule(self, scheduler: LRScheduler, steps: int) -> None:
        """Report the schedule of the learning rates, before training.

        Verdicts then show a warm-up that is longer than training and a schedule that ends too early. A correction needs
        it only where a schedule never reaches the learning rate that the optimizer was made with, and is not torch's
        ``OneCycleLR``: such as that of the first transformer, whose function returns learning rates.

        Args:
            scheduler: any of torch's that needs no metric, or one built like them.
            steps: the number of its calls in training.

        Raises:
            ValueError: its learning rates cannot be computed ahead.
        """
        try:
            plans = LookAhead(scheduler, [self._engine.model]).plans(steps)
        except Exception as error:
            raise ValueError(f"{type(scheduler).__name__} cannot be looked ahead: {error}") from error
        for group, plan in zip(scheduler.optimizer.param_groups, plans, strict=True):
            self._supervisor.plan(group["params"], plan)

    def abandon_step(self) -> None:
        """Give up a step that has begun, such as one that raised an error; safe to call at any time."""
        self._open = False
        self._watch.forget()
        self._engine.disarm()
        self._supervisor.disarm()

    def end_step(self, *, accumulated: int = 1, loss_parts: int = 1) -> None:
        """Measure the step that has begun, if measurements are due.

        Args:
            accumulated: as for :meth:`step`.
            loss_parts: where the model divides its loss by the tokens of all micro-batches and processes, the number of
                such losses in the sum that is the step's loss; 1 where that is their mean.
        """
        if self._watch.postpone():
            self.steps -= 1
            self.abandon_step()
            return
        self._open = False
        self._supervisor.disarm()
        measurement = self._watch.end(self.steps, accumulated, loss_parts)
        if measurement is not None:
            stops = self._take(measurement, self._supervisor, self._sinks.write, self._say, self.is_first)
            self.should_stop |= stops is not None

    def _say(self, text: str) -> None:
        """Print a line, on the first process."""
        if self._verbose:
            print(in_lines(f"spectral monitor: {text}"), flush=True)

    def close(self) -> None:
        """Close the sinks after training; without sinks it does nothing."""
        self._sinks.close()

    def __repr__(self) -> str:
        return f"SpectralProbe({counted(self.anatomy.infos)}, steps={self.steps})"
