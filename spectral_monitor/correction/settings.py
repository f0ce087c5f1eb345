"""How learning rates are put right, checked once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Policy = Literal["balance", "target", "reference", "fsc"]
POLICIES: tuple[str, ...] = get_args(Policy)


@dataclass(frozen=True)
class LRCorrection:
    """How learning rates are corrected.

    Every policy wants something of each layer's update, and multiplies the layer's learning rate until it has it:

    * ``"balance"``: an operator with a verdict on its update comes to the geometric median of ``update_natural`` over
      all operators, and is kept there. The learning rate means what it did, and layers that are in order keep theirs.
    * ``"target"``: every layer's ``update_natural`` equal to the scheduled learning rate times a share that depends on
      its kind alone, 1 for operators. It is then in natural units, the relative size of a step's change, and the best
      one does not depend on width.
    * ``"reference"``: the ``update_natural`` of a profile recorded on a tuned narrow run, scaled by the learning rates.
    * ``"fsc"``: every operator's contribution to the loss decrease equal to the learning rate over the number of
      operators, for plain gradient descent ``eta = lr / (L |g|^2)`` (Feature Speed Formula, Eq. 8).

    Attributes:
        policy: one of the four.
        reference: the profile's file, for ``"reference"``.
        gain: how much of what is missing (in logarithms) one measurement makes up for; the first one of a layer, which
            knows nothing yet, all of it.
        max_change: the largest factor by which later ones change a multiplier.
        deadband: multipliers stay where they are while what they aim at is nearer than this factor.
        limits: the smallest and the largest multiplier.
        spectral_init: first rescale the measured weights as :func:`spectral_init_` does: a number to that natural norm,
            ``True`` to 2, which keeps the size of features, or to 1.25 in a network with normalization layers whose
            readout is not tied to an embedding.

    Raises:
        ValueError: an unknown policy, a number out of range, a reference without its policy or the other way round.

    Example:
        >>> LRCorrection("target").gain
        0.5
    """

    policy: Policy = "balance"
    reference: str | None = None
    gain: float = 0.5
    max_change: float = 2.0
    deadband: float = 1.1
    limits: Sequence[float] = (1e-6, 1e6)
    spectral_init: bool | float = False

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"unknown policy {self.policy!r}; valid policies: {', '.join(POLICIES)}")
        if (self.reference is not None) != (self.policy == "reference"):
            raise ValueError(
                'policy "reference" needs the file of a profile as reference, and no other policy takes one'
            )
        if not 0 < self.gain <= 1:
            raise ValueError(f"gain must be in (0, 1], got {self.gain!r}")
        for name in ("max_change", "deadband"):
            if not 1 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is a factor >= 1, got {getattr(self, name)!r}")
        if not 0 <= self.spectral_init < math.inf:
            raise ValueError(f"spectral_init is True, False or a natural norm, got {self.spectral_init!r}")
        if len(self.limits) != 2 or not 0 < self.limits[0] <= 1 <= self.limits[1] < math.inf:
            raise ValueError(f"limits are two positive numbers around 1, got {self.limits!r}")

    @property
    def quantities(self) -> tuple[str, ...]:
        """What has to be measured, first what the policy aims at."""
        aim = "contribution" if self.policy == "fsc" else "update_natural"
        return tuple(dict.fromkeys((aim, "contribution", "update_fro", "weight_fro", "lr", "lr_multiplier")))
