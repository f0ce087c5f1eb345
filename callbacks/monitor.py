"""The Lightning callback: when to measure, where to log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from spectral_monitor.callbacks.batch_watch import BatchWatch
from spectral_monitor.callbacks.checkpoints.hooks import CheckpointHooks
from spectral_monitor.callbacks.conflicts import check_conflicts, monitor_index
from spectral_monitor.callbacks.console import NO_LOGGER, ConsoleReport, checked_verbose, tell
from spectral_monitor.callbacks.loggers import SinkManager
from spectral_monitor.callbacks.schedules import Schedules
from spectral_monitor.callbacks.strategies import check_supported, strategy_context
from spectral_monitor.callbacks.training_step_replay import can_run_again
from spectral_monitor.condition import SpectralCondition
from spectral_monitor.correction import LRCorrection
from spectral_monitor.correction.settings import with_loss
from spectral_monitor.engine import Engine, Settings
from spectral_monitor.engine.schedule import DEFAULT_SCHEDULE
from spectral_monitor.measurement import Measurement
from spectral_monitor.monitoring.live_run import LiveRun
from spectral_monitor.monitoring.reactions import OnVerdict
from spectral_monitor.monitoring.settings import Mode, checked, described, with_needed
from spectral_monitor.monitoring.supervisor import Supervisor
from spectral_monitor.reporting.content.essentials import Log, overall
from spectral_monitor.reporting.sinks import Sink
from spectral_monitor.reporting.text.console import code_command
from spectral_monitor.reporting.text.roles import Roles
from spectral_monitor.suggestions import helpful

if TYPE_CHECKING:
    import lightning.pytorch as pl


class SpectralMonitor(LiveRun, CheckpointHooks):
    """Measures every layer's weights, updates and features at every n-th optimizer step and logs them.

    Training does not change: parameters, optimizer state, gradients, buffers, random states and logged metrics are
    bit for bit the same. An unmeasured step costs a comparison. A measured one copies the weights, reads the copy some
    dozens of times and, for feature quantities, runs one more forward, with another copy held meanwhile. If the
    training step calls the model in several parts, the whole training step runs once more: with ``self.log`` and the
    loggers muted, but a file it writes is written twice.

    Every logger of the trainer receives, on the axis of Lightning's own metrics (which begins at 0),
    ``spectral_<quantity>/<layer>`` and ``spectral/summary/<name>``. In networks of more than 16 matrices it receives,
    instead of every layer, ``lowest``, ``median`` and ``highest`` of ``all`` and of each family. Numbers of the whole
    network, such as ``spectral/summary/violations`` and ``spectral_update_ratio/all/median``, are in
    ``trainer.callback_metrics`` too, for ``ModelCheckpoint`` and ``EarlyStopping``, from the first measurement on. If
    ``EarlyStopping`` checks earlier, it needs ``strict=False``, or Lightning ends the fit with an error. NaN is left
    out; ``monitor.latest.why(quantity, layer)`` gives its reason.

    Checkpoints hold the state to resume from: counters in the checkpoint, and beside it one file
    ``spectral-monitor-<hash>.pt`` with the weights that drift is counted from and the batch of ``feature_drift``: your
    data, as the model saw it. ``trainer.fit(..., ckpt_path=...)`` then measures the same as an uninterrupted run. The
    file is looked for beside the checkpoint, then where it was written. If it is missing, or the model has other
    layers, a warning says so and drift is counted from there. No file is written to a folder that a checkpoint names.
    Earlier :attr:`measurements` are not saved. Another ``fit`` of the same module object with the same monitor goes on
    too, with drift from the first fit's start; with another module it begins again.

    Args:
        every_n_steps: measure every n-th optimizer step; or steps in words, ``"1, 2, 4, ..., every 100"``: more of the
            first ones, where most happens; or a mapping from tiers and keys to either, such as ``{"light": 10,
            "feature_change": 50}``: a tier stands for its own quantities, not for those of the tiers below. At a step
            only quantities that are due cost time. With manual optimization, batches are counted.
        quantities: ``"light"`` (weights, updates, gradients: no hooks on modules, no extra forward), ``"standard"``
            (features too), ``"full"`` (kernels, backward speeds and checks of assumptions too; several times as slow)
            or a list of keys; only requested quantities cost time.
        include: fnmatch patterns on module or layer names; only these are measured.
        exclude: fnmatch patterns on module or layer names; these are not measured.
        roles: pattern -> ``"hidden"``, ``"embedding"``, ``"output"``, ``"vector"`` or ``"ignore"``, where the
            guess in the role table, printed at the start, is wrong.
        blocks: pattern -> number of matrices stacked in a weight (3 for fused query, key and value).
        heads: pattern on attention modules or query projections -> number of heads, where the module does not say it.
        nodes: fnmatch patterns on modules whose outputs are measured although they have no weight, such as
            ``["blocks.*", "norm"]``: their change, and its angle and sensitivity.
        max_rows: rows of a layer's features used at most, a fixed choice, and fewer in wide layers; ``None`` for all.
        replay_samples: samples that are run again after the step, the first ones of the batch (of each process's);
            ``None`` for all. With fewer, ``summary/feature_error`` says how far changes of features may be from those
            of the whole batch, and ``summary/loss_change`` is not known. ``"auto"`` runs few, and more while that error
            is above a tenth. All are run where a sample's outputs differ without the others, as with dropout or batch
            normalization in training mode; the first measured step shows it.
        tol: relative tolerance of spectral norms.
        drift_every: ``feature_drift``, which takes a forward of its own, at every n-th measured step that has features.
        history: measurements kept in :attr:`measurements`.
        condition: the limits that layers are judged by; every measurement has its verdicts.
        correction: how learning rates are corrected, with ``mode="correct"``.
        mode: ``"observe"`` says nothing; ``"warn"`` warns once when a layer begins to violate the condition;
            ``"correct"`` also corrects learning rates. Only that changes training.
        sinks: further receivers of every measurement, such as a :class:`~spectral_monitor.reporting.JSONLinesSink`.
        heatmap_every: pictures of layer by step, for loggers that take pictures, after measurements 3 and 10, every
            n-th and at the end; 0 for none. They need matplotlib.
        histograms: whether TensorBoard gets histograms of the layers' values.
        low_memory: keep the weights before the update, and the copy that guards them during the extra forward, in host
            memory, and measure one layer at a time: slower, with at most two layers' worth of memory on the device.
        max_overhead: share of training time that measuring may take, such as ``0.01``. Due steps are skipped until the
            last measurement has cost no more than that share of the time since, and a line reports the interval. The
            first two measurements of a run take longest and delay nothing. ``"auto"`` is 0.01 from step 100 on if
            ``every_n_steps`` is the default and nothing is corrected, else ``None``: nothing is timed.
        verbose: text besides warnings: 0 none; 1 the role table and the last table, in which a layer of every block
            shares one row; 2 both with a row for every matrix.
        log: the numbers that loggers receive; all are in the run's own file. ``"essential"``: at most 600 for 100
            matrices; ``"all"``: every number too, as ``spectral/<quantity>/<layer>``; or patterns of further numbers,
            such as ``["contribution/*", "*/head"]``.
        on_verdict: is called with every root :class:`~spectral_monitor.Verdict` that begins: to send a message, say. In
            several processes the first one calls it; its errors become warnings.
        stop_on: cause, or causes, such as ``["diverged", "exploding"]``, at which training stops, as it does by early
            stopping; ``"any"`` for all.

    Attributes:
        multipliers: layer -> multiplier of its learning rate; empty without a correction.

    Raises:
        ValueError: before the first step: an argument out of range, an unknown key, a pattern that matches nothing,
            a role or number of blocks that does not fit, or a way of training that is not supported.

    Example:
        >>> monitor = SpectralMonitor(every_n_steps=10, exclude=["*.bias"])
        >>> # trainer = lightning.Trainer(callbacks=[monitor])
        >>> monitor
        SpectralMonitor(every_n_steps=10, quantities='standard', mode='warn', measurements=0)
    """

    _variable = "monitor"  # its name in printed lines of code

    @helpful
    def __init__(
        self,
        every_n_steps: int | str | Mapping[str, int | str] = DEFAULT_SCHEDULE,
        *,
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
        heatmap_every: int = 20,
        histograms: bool = False,
        low_memory: bool = False,
        max_overhead: float | Literal["auto"] | None = "auto",
        verbose: int = 1,
        log: Log = "essential",
        on_verdict: OnVerdict | None = None,
        stop_on: str | Sequence[str] = (),
    ) -> None:
        CheckpointHooks.__init__(self)
        self.verbose = checked_verbose(verbose)
        self.mode, self.condition, self.correction = mode, condition, checked(mode, condition, correction)
        settings = Settings(
            every_n_steps=every_n_steps,
            quantities=with_needed(quantities, self.correction),
            include=include,
            exclude=exclude,
            roles=roles,
            blocks=blocks,
            heads=heads,
            nodes=nodes,
            max_rows=max_rows,
            replay_samples=with_loss(replay_samples, self.correction),
            tol=tol,
            drift_every=drift_every,
            history=history,
            low_memory=low_memory,
            max_overhead=max_overhead,
        )
        LiveRun.__init__(self, settings, on_verdict, stop_on)
        self.on_verdict, self.stop_on = on_verdict, stop_on if isinstance(stop_on, str) else tuple(stop_on)
        self.multipliers: dict[str, float] = {}
        self._supervisor: Supervisor | None = None
        self._roles: Roles | None = None
        self._schedules: Schedules | None = None  # until training starts
        config = described(mode, condition, self.correction)
        requested = () if isinstance(quantities, str) else tuple(quantities)
        self._reports = SinkManager(sinks, heatmap_every, histograms, config, self._warn, log, requested)
        self._batches: BatchWatch | None = None
        self._console = ConsoleReport(self.verbose, every_n_steps, settings.schedule)

    def roles(self) -> Roles:
        """Return every measured layer with its role, and the parameters that are not measured, once a fit has begun.

        Raises:
            RuntimeError: no fit has begun.
        """
        return super().roles() if self._roles is None else self._roles

    def __repr__(self) -> str:
        s = self.settings
        return (
            f"{type(self).__name__}(every_n_steps={s.every_n_steps!r}, quantities={s.quantities!r}, "
            f"mode={self.mode!r}, measurements={len(self.measurements)})"
        )

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make the engine and the supervisor, refuse unsupported fits, and print the role table."""
        check_supported(trainer, pl_module)
        processes, wrapper = strategy_context(trainer)
        repeatable = pl_module.automatic_optimization and can_run_again(pl_module)
        corrected, redirected = self.mode == "correct", trainer.strategy.model is not pl_module
        self._engine = Engine(
            pl_module, trainer.optimizers, self.settings, processes, wrapper, corrected, repeatable, redirected
        )
        check_conflicts(trainer, self)
        self._supervisor = Supervisor(self.mode, self.condition, self.correction, self._engine)
        self._roles = Roles.of(self._engine.anatomy)
        self._schedules = Schedules(trainer, pl_module)
        due = partial(self._supervisor.due, tell=partial(self._console.tell, trainer))
        self._batches = BatchWatch(self._engine, due, self._errors_as_warnings)
        self._console.show_roles(self._engine.anatomy)
        if not trainer.loggers:
            self._console.tell(trainer, NO_LOGGER)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Resume from a checkpoint or an earlier fit; else keep the weights that drift is counted from."""
        if self._engine is None or self._supervisor is None:
            return
        with self._errors_as_warnings("learning-rate schedules could not be looked ahead"):
            for parameters, plan in () if self._schedules is None else self._schedules.plans(trainer, pl_module):
                self._supervisor.plan(parameters, plan)
        self._schedules = None
        # A correction may change the meaning of learning rates; the recipe means nothing then.
        meaning = self._supervisor.decision or (self._supervisor.recipe if self.mode != "observe" else "")
        if meaning:
            self._console.tell(trainer, f"spectral monitor: {meaning}")
        if trainer.global_step == 0 and trainer.ckpt_path is None and not self._continuation.knows(pl_module):
            self._supervisor.rescale()  # neither loaded nor trained
        self._continuation.begin(trainer, pl_module, self._engine, self._supervisor, self._warn)
        self.multipliers = self._supervisor.multipliers
        self._supervisor.arm()
        self._reports.begin(trainer, monitor_index(trainer, self))
        self._console.begin(trainer.global_step)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Arm the engine if the optimizer steps in this batch and its step is due."""
        if self._batches is not None:
            self._batches.begin(trainer, pl_module, batch, batch_idx)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock: validation is no part of a step."""
        if self._engine is not None and self._engine.budget is not None:
            self._engine.budget.pause()

    def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer) -> None:
        """Close the forward window: the training step is done."""
        if self._batches is not None:
            self._batches.end_forward(pl_module)

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Begin to count gradients as those of the step."""
        if self._batches is not None:
            self._batches.begin_backward(trainer, pl_module, loss)

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ignore later gradients."""
        if self._batches is not None:
            self._batches.end_backward(pl_module)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measure a step that was due, log it and react to it."""
        if self._engine is None or self._supervisor is None or self._batches is None:
            return
        watched = self._engine.armed
        measurement = self._batches.end(trainer, pl_module, outputs)
        if watched:
            with self._errors_as_warnings("checkpoints will not contain the probe batch"):
                self._continuation.agree(self._engine)
        if measurement is not None:
            self._use(measurement, trainer, self._supervisor)

    def _use(self, measurement: Measurement, trainer: pl.Trainer, supervisor: Supervisor) -> None:
        """Log a measurement, correct learning rates, and stop training if a verdict of ``stop_on`` begins."""
        begin = perf_counter()
        write, say = partial(self._write, trainer), partial(self._console.tell, trainer)
        stops = self._take(measurement, supervisor, write, say, trainer.is_global_zero)
        self.multipliers = supervisor.multipliers
        if stops is not None and not trainer.should_stop:
            trainer.should_stop = True
            reason = f"{stops.layer}: {stops.sentence}"
            tell(trainer, f"spectral monitor: training stops after step {measurement.step}: {reason}")
        self._console.spend(measurement.summary["overhead_ms"] / 1e3 + perf_counter() - begin)

    def _write(self, trainer: pl.Trainer, measurement: Measurement) -> None:
        self._reports.write(measurement)
        with self._errors_as_warnings("ModelCheckpoint and EarlyStopping cannot see this measurement"):
            trainer.callback_metrics.update({key: torch.tensor(x) for key, x in overall(measurement).items()})

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the last table and the cost of measuring, and say where to find the corrected rates as code."""
        if self._engine is not None:
            measured = self._engine.measured > self._continuation.measured_before
            self._console.end(trainer, self.measurements if measured else (), self._reports.folder)
            if self.correction is not None and self._engine.measured > 0:
                self._console.tell(trainer, code_command(self._variable))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Remove hooks of a batch that another callback skipped after its start, which ends the epoch."""
        self.on_validation_start(trainer, pl_module)
        if self._engine is not None and self._batches is not None and self._engine.armed:
            self._engine.disarm()
            self._batches.forget()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Remove all hooks."""
        self._stop(pl_module)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Remove all hooks."""
        if stage == "fit":
            self._stop(pl_module)

    def __getstate__(self) -> dict[str, Any]:
        """Return settings and measurements, without parts that belong to a fit or a model, or that Lightning adds."""
        state = {key: value for key, value in vars(self).items() if key not in ("log", "log_dict")}
        return {**state, **dict.fromkeys(("_engine", "_supervisor", "_schedules", "_batches"))}

    def _stop(self, module: pl.LightningModule) -> None:
        with self._errors_as_warnings("the learning rates could not be written as code"):
            self._keep_code()
        self._reports.end()
        if self._supervisor is not None:
            self._supervisor.disarm()
        if self._engine is not None:
            self._engine.disarm()
            with self._errors_as_warnings("the state at the end of training could not be kept"):
                self._continuation.end(module, self._engine)
        self._engine = self._supervisor = self._schedules = self._batches = None
