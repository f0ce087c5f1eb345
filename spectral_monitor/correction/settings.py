"""Settings of learning-rate corrections, checked once."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, get_args

from spectral_monitor.arguments import is_number
from spectral_monitor.suggestions import helpful_settings

Policy = Literal["target", "balance", "reference", "fsc"]
POLICIES: tuple[str, ...] = get_args(Policy)


@helpful_settings
@dataclass(frozen=True)
class LRCorrection:
    """Settings of a learning-rate correction.

    Every policy wants a size of each layer's update, and multiplies the layer's learning rate until it has that size:

    * ``"target"``: every layer's ``update_natural`` equals ``size`` at the peak of the schedule, times a share that
      depends only on the kinds of layer and optimizer. The best size does not depend on the width.
    * ``"balance"``: an operator with a verdict on its update, caused by the settings, gets the geometric median of
      ``update_natural`` over all operators, and is kept there. The learning rate keeps its meaning, and healthy layers
      keep theirs.
    * ``"reference"``: the ``update_natural`` of a profile recorded on a tuned narrow run, scaled by the learning rates.
    * ``"fsc"``: the contribution of every block of parameters to the loss decrease equals the learning rate over the
      number ``L`` of blocks, so that all together lower the loss by the learning rate. For plain gradient descent
      ``eta = lr / (L |g|^2)`` (Feature Speed Formula, Eq. 8). A block is a matrix with the bias beside it, the gain and
      bias of a norm, or a parameter that stands alone. Parameters without a gradient, and gains and lone biases in half
      precision, whose updates rounding hides, are left alone.

    Attributes:
        policy: one of the four.
        reference: the profile's file, for ``"reference"``.
        size: for ``"target"``, the natural norm of an operator's update at the peak of the schedule. The optimizer's
            learning rate gives only the schedule's shape, ``lr / peak``. ``"lr"``: the optimizer's learning rate is
            the size.
        polyak: for ``"fsc"``, the lowest possible loss, such as 0: all blocks together lower the loss by ``lr (loss -
            polyak)``, Polyak's step at ``lr=1``. It needs the loss of the whole batch, whose forward runs once more
            after a measured step. At or below ``polyak`` multipliers stay.
        qk_clip: the largest allowed attention logit, such as 100; ``None`` for no limit. Above it the learning rates of
            the block's queries and keys are lowered, whatever the policy; weights stay. A projection that makes the
            values too is slowed as a whole.
        limits: the smallest and the largest multiplier, relative to what the optimizer's settings explain.
        spectral_init: first rescale the measured weights, as :func:`spectral_init_` does, to this natural norm.
            ``True``: to 2, which keeps the size of features, or to 1.25 in a network with normalization layers whose
            readout is not tied to an embedding. ``"auto"``: as ``True``, but only freshly drawn weights, not loaded
            ones, and nothing beside frozen weights or adapters.

    Raises:
        ValueError: an unknown policy, a number out of range, a reference without its policy or the other way round.

    Example:
        >>> LRCorrection().size
        0.125
    """

    policy: Policy = "target"
    reference: str | None = None
    size: float | Literal["lr"] = 1 / 8
    polyak: float | None = None
    qk_clip: float | None = None
    limits: Sequence[float] = (1 / 64, 64.0)
    spectral_init: bool | float | Literal["auto"] = False

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            is_correction = isinstance(self.policy, LRCorrection)  # which SpectralMonitor and SpectralProbe take
            hint = "; pass its arguments directly, as in SpectralLRCorrector(size=1/16)" if is_correction else ""
            raise ValueError(f"unknown policy {self.policy!r}; valid policies: {', '.join(POLICIES)}{hint}")
        if (self.reference is not None) != (self.policy == "reference"):
            raise ValueError(
                'policy "reference" needs the file of a profile as reference, and no other policy takes one'
            )
        if self.size != "lr" and not (is_number(self.size) and 0 < float(self.size) < math.inf):
            raise ValueError(f'size must be a positive number or "lr", got {self.size!r}')
        if self.polyak is not None and self.policy != "fsc":
            raise ValueError(f'polyak needs policy "fsc", got {self.policy!r}')
        if self.polyak is not None and not (is_number(self.polyak) and math.isfinite(self.polyak)):
            raise ValueError(f"polyak must be a number, the lowest loss that can be reached; got {self.polyak!r}")
        if self.qk_clip is not None and not (is_number(self.qk_clip) and 0 < self.qk_clip < math.inf):
            raise ValueError(f"qk_clip must be a positive number or None, got {self.qk_clip!r}")
        norm: object = self.spectral_init
        if norm != "auto" and not (isinstance(norm, Real) and 0 <= float(norm) < math.inf):
            raise ValueError(f'spectral_init must be True, False, "auto" or a natural norm, got {norm!r}')
        if (
            not isinstance(self.limits, Sequence)
            or len(self.limits) != 2
            or not all(map(is_number, self.limits))
            or not 0 < self.limits[0] <= 1 <= self.limits[1] < math.inf
        ):
            raise ValueError(f"limits must be two positive numbers around 1, got {self.limits!r}")

    @property
    def of_peak(self) -> bool:
        """True if the optimizer's learning rates give only the shape of a schedule."""
        return self.policy == "target" and self.size != "lr"

    @property
    def quantities(self) -> tuple[str, ...]:
        """The quantities that have to be measured, first the one the policy controls."""
        aims = ("contribution",) if self.policy == "fsc" else ("update_natural", "contribution")
        began = ("weight_natural",) if self.policy == "target" else ()
        loss = ("feature_change",) if self.polyak is not None else ()
        logits = ("attention_logit_max",) if self.qk_clip is not None else ()
        return (*aims, "update_fro", "weight_fro", *began, *loss, *logits, "lr", "lr_multiplier")

    def check_saved(self, state: Mapping[str, Any], layers: Collection[str]) -> None:
        """Check that the saved state of a corrector has this policy and size, and these layers.

        Raises:
            ValueError: it does not, or is of an earlier version.
        """
        if state["policy"] != self.policy:
            raise ValueError(f"the saved multipliers belong to policy {state['policy']!r}, not {self.policy!r}")
        if "units" not in state:
            raise ValueError("the saved multipliers were written by an earlier version")
        if state["size"] != self.size:
            raise ValueError(f"the saved multipliers belong to size {state['size']!r}, not {self.size!r}")
        if set(state["units"]) != set(layers):
            differing = sorted(set(state["units"]) ^ set(layers))
            raise ValueError(f"the saved multipliers belong to other layers: {', '.join(differing[:6])}")


def with_loss(
    replay_samples: int | Literal["auto"] | None, correction: LRCorrection | None
) -> int | Literal["auto"] | None:
    """Return the number of samples in the replay: all of them (``None``) if the correction needs the loss.

    Raises:
        ValueError: fewer were asked for.
    """
    if correction is None or correction.polyak is None:
        return replay_samples
    if replay_samples not in ("auto", None):
        raise ValueError(f"polyak needs the loss of the whole batch: set replay_samples=None, got {replay_samples!r}")
    return None
