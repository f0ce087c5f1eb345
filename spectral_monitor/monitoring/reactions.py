"""Reactions to verdicts: a function is called, training is stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from spectral_monitor.condition.causes.explanation import CAUSES
from spectral_monitor.condition.verdict import Verdict
from spectral_monitor.messages import WarnOnce
from spectral_monitor.suggestions import unknown

OnVerdict = Callable[[Verdict], object]
ANY = "any"
"""Stands for every cause."""
_SYNONYMS = {
    "nan": "diverged",
    "inf": "diverged",
    "explode": "exploding",
    "divergence": "diverged",
    "lr": "lr_too_large",
}
"""Words that people try for a cause -> the cause."""


class Reactions:
    """Calls a function for each verdict that begins, and finds the one to stop training for.

    Args:
        on_verdict: is called with each root verdict that begins. Its errors become warnings.
        stop_on: a cause, or several, of :data:`~spectral_monitor.condition.CAUSES`; ``"any"`` for all of them.

    Raises:
        TypeError: ``on_verdict`` cannot be called, or ``stop_on`` holds something other than strings.
        ValueError: an unknown cause.

    Example:
        >>> Reactions(None, "explodes")
        Traceback (most recent call last):
        ...
        ValueError: stop_on: no cause 'explodes'; did you mean 'exploding'? It has: any, lr_zero, lr_too_large, \
lr_too_small, rates_too_large, global_lr_too_large, stale_gradients, one_direction, rates_too_small, momentum, \
decay_too_large, warmup_too_long, schedule_too_short, eval_mode, dropout, loss_input, width, \
sgd_rule_under_adam, ntk_scaling, eps, input_scale, target_scale, symmetric, readout_init, weights_too_large, \
weights_too_small, weights_grown, embedding_scale, exploding, rounding, dead, dead_input, dead_above, left_out, \
unmoved, vanishing, readout_width, frobenius_rule, readout_takes_all, diverged, ... (45 in all)
    """

    def __init__(self, on_verdict: OnVerdict | None, stop_on: str | Sequence[str]) -> None:
        if on_verdict is not None and not callable(on_verdict):
            raise TypeError(f"on_verdict must be a function of a verdict, got {on_verdict!r}")
        values = [stop_on] if isinstance(stop_on, str) else stop_on
        causes = list(values) if isinstance(values, Iterable) else [values]
        if not all(isinstance(cause, str) for cause in causes):
            valid = ", ".join([ANY, *CAUSES])
            raise TypeError(f"stop_on must be a cause or a list of them, got {stop_on!r}; valid: {valid}")
        for cause in causes:
            if cause != ANY and cause not in CAUSES:
                if cause in _SYNONYMS:
                    raise ValueError(f"stop_on: no cause {cause!r}; did you mean {_SYNONYMS[cause]!r}?")
                raise ValueError(f"stop_on: {unknown('cause', cause, [ANY, *CAUSES])}")
        self._on_verdict, self._causes = on_verdict, frozenset(causes)

    def __call__(self, began: Sequence[Verdict], warn: WarnOnce, speaks: bool = True) -> Verdict | None:
        """React to verdicts that begin, and return the first one to stop training for.

        Args:
            warn: receives a message if the function fails.
            speaks: whether to call the function, as in one process of several.
        """
        if self._on_verdict is not None and speaks:
            for verdict in began:
                try:
                    self._on_verdict(verdict)
                except Exception as error:
                    warn(f"on_verdict failed ({type(error).__name__}: {error}); training goes on", error)
        return next((verdict for verdict in began if ANY in self._causes or verdict.cause in self._causes), None)
