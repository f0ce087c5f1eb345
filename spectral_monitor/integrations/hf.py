"""The callback for Hugging Face's Trainer."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from spectral_monitor.engine.schedule import DEFAULT_SCHEDULE
from spectral_monitor.engine.settings import FEATURES
from spectral_monitor.integrations.hf_checkpoint import ResumeFiles
from spectral_monitor.measurement import Measurement
from spectral_monitor.messages import WarnOnce
from spectral_monitor.monitoring.probe import SpectralProbe
from spectral_monitor.reporting.files.jsonlines import JSONLinesSink, run_file_name
from spectral_monitor.reporting.run import MeasuredRun
from spectral_monitor.reporting.sinks import checked_sinks
from spectral_monitor.reporting.text.console import in_words, nothing_measured, page_command, rendered
from spectral_monitor.reporting.text.role_table import role_rows
from spectral_monitor.reporting.text.table import measurement_rows
from spectral_monitor.suggestions import unknown

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.training_args import ParallelMode
except ImportError as error:
    raise ImportError(
        f"spectral_monitor.integrations.hf needs transformers ({error}): pip install 'spectral-monitor[hf]'"
    ) from error

SUPPORTED = "one process, DDP (torchrun) or FSDP"
SET_BY_CALLBACK = ("model", "optimizer", "every_n_steps", "sinks", "max_overhead", "verbose")
"""Arguments of the probe that the callback sets itself."""


class SpectralCallback(MeasuredRun, TrainerCallback):
    """Measures every layer's weights, updates and features at every n-th optimizer step of a ``transformers.Trainer``.

    Training is not changed: parameters, optimizer state, random states and the Trainer's logs stay bit for bit what
    they would have been. Gradients may be accumulated; updates are then those of the whole step, features those of its
    last micro-batch. Under DDP and FSDP numbers are those of one process with the whole batch.

    Measurements go to ``spectral_monitor.jsonl`` in the Trainer's ``output_dir``, which ``spectral-monitor report``
    reads, and to ``sinks``. To resume, every checkpoint folder has a small file, and ``output_dir/_spectral_monitor``,
    which is not pushed to the Hub, has the weights from which drift is counted and the batch on which
    ``feature_drift`` is measured: your data, as the model saw it. Keep that folder with the checkpoints.

    The Trainer does not report exceptions to callbacks. If you use the model after one, call :meth:`abandon`.

    Args:
        every_n_steps: as for :class:`~spectral_monitor.SpectralMonitor`.
        sinks: others that receive every measurement, such as a :class:`~spectral_monitor.reporting.TensorBoardSink`.
        max_overhead: as for :class:`~spectral_monitor.SpectralMonitor`.
        verbose: output besides warnings: 0 none; 1 the layers of the model and the last table, in which the same layer
            of all blocks shares a row; 2 both with a row for every matrix.
        resume_from: folder of the checkpoint from which training resumes, if it is not in ``output_dir``.
        options: further arguments of :class:`~spectral_monitor.SpectralProbe`.

    Attributes:
        probe: of the present or last training; ``None`` before the first.

    Raises:
        TypeError: an option that the probe does not have.
        ValueError: an argument out of range; when training begins, also errors of the probe, and a way of training
            that is not supported.

    Example:
        >>> callback = SpectralCallback(quantities="light")  # doctest: +SKIP
        >>> trainer = Trainer(model, arguments, train_dataset=data, callbacks=[callback])  # doctest: +SKIP
    """

    def __init__(
        self,
        every_n_steps: int | str | Mapping[str, int | str] = DEFAULT_SCHEDULE,
        *,
        sinks: Sequence[Any] = (),
        max_overhead: Any = "auto",
        verbose: int = 1,
        resume_from: str | Path | None = None,
        **options: Any,
    ) -> None:
        if verbose not in (0, 1, 2):
            raise ValueError(f"verbose must be 0, 1 or 2, got {verbose!r}")
        allowed = [name for name in inspect.signature(SpectralProbe).parameters if name not in SET_BY_CALLBACK]
        for name in options:
            if name not in allowed:
                raise TypeError(f"SpectralCallback: {unknown('option', name, allowed)}")
        self.verbose = int(verbose)
        self.probe: SpectralProbe | None = None
        self._options = {**options, "every_n_steps": every_n_steps, "max_overhead": max_overhead}
        self._sinks = checked_sinks(sinks)
        self._resume_from = None if resume_from is None else Path(resume_from)
        self._warn = WarnOnce()
        self._folder = Path()
        self._files: ResumeFiles | None = None
        self._micro_batches, self._first = 1, 0

    @property
    def measurements(self) -> Sequence[Measurement]:
        """The latest measurements."""
        return () if self.probe is None else self.probe.measurements

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Make the probe, and resume it from the checkpoint if there is one."""
        self.abandon()
        _refuse(args)
        trial = state.trial_name if state.is_hyper_param_search else None
        self._folder = folder = Path(args.output_dir or ".") / (trial or "")
        model, optimizer = kwargs["model"], kwargs["optimizer"]  # as accelerate has wrapped them
        run_info = {"model": type(model).__name__} | ({"optimizer": args.optim} if isinstance(args.optim, str) else {})
        file = JSONLinesSink(folder / run_file_name(1), run_info)
        self.probe = probe = SpectralProbe(
            model, optimizer, sinks=[file, *self._sinks], verbose=self.verbose > 0, **self._options
        )
        if getattr(args, "torch_compile", False) and probe.settings.needs & FEATURES:
            self.probe = None
            raise ValueError(
                "SpectralCallback sees no features in a model that the Trainer compiles (torch_compile=True): choose "
                "quantities='light', or compile the model's blocks yourself"
            )
        with suppress(ValueError):  # some schedules cannot be run ahead, such as those that depend on a metric
            scheduler: Any = kwargs.get("lr_scheduler")
            probe.report_schedule(getattr(scheduler, "scheduler", scheduler), state.max_steps - state.global_step - 1)
        self._files = ResumeFiles(folder, probe, self._warn)
        self._first = state.global_step
        if state.global_step:
            expected = folder / f"checkpoint-{state.global_step}"  # the Trainer does not say where it resumes from
            self._files.load(self._resume_from or expected, state.global_step)
        when = in_words(probe.settings.every_n_steps)
        self._show(rendered(role_rows(probe.anatomy, folded=self.verbose < 2, when=when)))

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Begin a step, before its first micro-batch."""
        self._micro_batches = 1
        if self.probe is not None:
            self.probe.begin_step()

    def on_substep_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Count micro-batches; the last step of an epoch may have fewer."""
        self._micro_batches += 1

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Measure the step, right after that of the optimizer."""
        if self.probe is not None:
            self.probe.end_step(accumulated=self._micro_batches, loss_parts=self._loss_parts(args))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        """Stop training if a verdict requests it."""
        if self.probe is not None and self.probe.should_stop:
            control.should_training_stop = True
        return control

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Write the probe's state into the checkpoint that was just saved."""
        if self._files is not None:
            self._files.save(f"checkpoint-{state.global_step}")

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Remove hooks of a step that ended in an exception."""
        self.abandon()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Print the last table and close the sinks."""
        self.abandon()
        if self.probe is None:
            return
        self.probe.close()
        if self.latest is None:
            settings, steps = self.probe.settings, state.global_step
            following = settings.schedule.after(steps)
            self._show(nothing_measured(steps - self._first, self._first, settings.every_n_steps, following))
        else:
            table = measurement_rows(
                self.latest, folded=self.verbose < 2, earlier=self.probe.measurements, steps=state.global_step
            )
            self._show(rendered(table))
            self._show(page_command(str(self._folder)))

    def abandon(self) -> None:
        """Remove hooks after an exception in the middle of a step; can be called at any time."""
        if self.probe is not None:
            self.probe.abandon_step()

    def _loss_parts(self, args: TrainingArguments) -> int:
        """Return the number of losses that add up to the step's; 1 unless models divide by its number of tokens."""
        assert self.probe is not None
        engine = self.probe._engine
        if all(call.arguments[1].get("num_items_in_batch") is None for call in engine.calls):
            return 1
        if engine.processes is None or not args.average_tokens_across_devices:
            return self._micro_batches
        return self._micro_batches * len(set(engine.processes.batches))

    def _show(self, text: str) -> None:
        """Print a text, on the first process."""
        if self.verbose and self.probe is not None and self.probe.is_first:
            print(f"\n{text}\n", flush=True)


def _refuse(args: TrainingArguments) -> None:
    """Refuse ways of training that would give wrong numbers.

    Raises:
        ValueError: naming what is not supported and what is.
    """
    if args.deepspeed or getattr(args, "deepspeed_plugin", None) is not None:  # the latter from `accelerate launch`
        raise ValueError(f"SpectralCallback does not measure DeepSpeed; supported: {SUPPORTED}")
    mode = args.parallel_mode
    if mode is ParallelMode.NOT_DISTRIBUTED:
        raise ValueError(
            f"SpectralCallback does not measure nn.DataParallel on {args.n_gpu} devices: start the script with "
            f"torchrun, or make only one device visible; supported: {SUPPORTED}"
        )
    if mode not in (ParallelMode.NOT_PARALLEL, ParallelMode.DISTRIBUTED):
        raise ValueError(f"SpectralCallback does not measure {mode.value}; supported: {SUPPORTED}")
