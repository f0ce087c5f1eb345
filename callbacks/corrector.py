"""The monitor with settings for one purpose: corrected learning rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from inspect import signature
from typing import Any, Literal

from spectral_monitor.callbacks.monitor import SpectralMonitor
from spectral_monitor.condition import SpectralCondition
from spectral_monitor.correction import LRCorrection
from spectral_monitor.correction.settings import Policy
from spectral_monitor.monitoring.reactions import OnVerdict
from spectral_monitor.reporting.sinks import Sink
from spectral_monitor.suggestions import did_you_mean


class SpectralLRCorrector(SpectralMonitor):
    """Corrects every layer's learning rate: a :class:`SpectralMonitor` that measures only what corrections need.

    Whatever learning rate the optimizer has, its schedule keeps its shape, and at the peak each step changes a layer's
    outputs by the fraction ``size``; the best size hardly depends on the width of the network. Schedulers, checkpoints
    and ``LearningRateMonitor`` see the optimizer's own learning rates. The factors on them are in :attr:`multipliers`,
    in the logs as ``spectral_lr_multiplier/<layer>``, and in checkpoints.

    Args:
        policy: ``"target"``, ``"balance"``, ``"reference"`` or ``"fsc"``: see
            :class:`~spectral_monitor.correction.LRCorrection`.
        every_n_steps: measure and correct every n-th optimizer step, and at the start the 1st, 2nd, 4th and so on.
        size: for ``"target"``, of a step at the peak of the schedule; ``"lr"``: the optimizer's learning rate.
        reference: the file of a profile, for ``"reference"``.
        spectral_init: rescale the weights before the first step, a number to that natural norm, ``True`` to the norm
            that suits the network, ``"auto"`` only weights that were just drawn.
        include, exclude, roles, blocks, history, condition, sinks, verbose, on_verdict, stop_on: as for the monitor.
            Layers that are not measured keep the optimizer's learning rate.
        correction: other settings of :class:`~spectral_monitor.correction.LRCorrection`.

    Raises:
        ValueError: as for the monitor; a policy without its reference; when training starts, an optimizer whose
            learning rates cannot be multiplied (LBFGS, Rprop, ASGD).
        TypeError: an argument that neither it nor the correction has.

    Example:
        >>> corrector = SpectralLRCorrector()
        >>> # trainer = lightning.Trainer(callbacks=[corrector])
        >>> corrector.correction.policy, corrector.settings.every_n_steps
        ('target', 10)
    """

    _variable = "corrector"

    def __init__(
        self,
        policy: Policy = "target",
        every_n_steps: int | str = 10,
        *,
        size: float | Literal["lr"] = LRCorrection.size,
        reference: str | None = None,
        spectral_init: bool | float | Literal["auto"] = False,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        roles: Mapping[str, str] | None = None,
        blocks: Mapping[str, int] | None = None,
        history: int = 1000,
        condition: SpectralCondition = SpectralCondition(),
        sinks: Sequence[Sink] = (),
        verbose: int = 1,
        on_verdict: OnVerdict | None = None,
        stop_on: str | Sequence[str] = (),
        **correction: Any,
    ) -> None:
        named = [name for name in signature(SpectralLRCorrector).parameters if name != "correction"]
        others = [f.name for f in fields(LRCorrection) if f.name not in named]
        for name in correction:
            if name not in others:
                hint = did_you_mean(name, named + others) or "."
                raise TypeError(
                    f"SpectralLRCorrector has no argument {name!r}{hint} Valid: {', '.join(named + others)}"
                )
        rule = LRCorrection(policy, reference, size, spectral_init=spectral_init, **correction)
        super().__init__(
            every_n_steps=every_n_steps,
            quantities=rule.quantities,
            include=include,
            exclude=exclude,
            roles=roles,
            blocks=blocks,
            history=history,
            condition=condition,
            sinks=sinks,
            verbose=verbose,
            on_verdict=on_verdict,
            stop_on=stop_on,
            correction=rule,
            mode="correct",
        )
