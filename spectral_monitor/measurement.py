"""The measurement: one immutable table, layer by quantity, and a summary row."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex, overload

from spectral_monitor.quantities import QUANTITIES
from spectral_monitor.suggestions import did_you_mean, unknown

if TYPE_CHECKING:
    from torch import Tensor

    from spectral_monitor.condition import Verdict

LOST = "a gradient arrives, but nothing of it is left in the update"
"""The reason why a contribution is exactly 0 although no layer is dead."""
ZERO = "undefined: it divides by a norm that is zero"
"""The reason why a ratio to a matrix that is zero, or began at zero, has no value."""
NOT_FINITE = "NaN or inf in its values"
"""The reason why weights, updates or features that are not finite have no values."""
NOT_CALLED = "not called in this step"
PASSED_OVER = "called in this step, but not in the last forward, and no gradient came back"
"""The reason why a layer has no features although its calls could be observed."""
UNFIT = "its outputs are not its inputs times its weight"
"""The reason why a layer has no features if its module multiplies its weight by something else."""
NOT_STEPPED = "its optimizer did not step"
"""The reason why a layer has no update although other optimizers made a step."""
UNUSED = "no gradient: it was not used in this step, or is cut off from the loss"
"""The reason why a layer has no update although its optimizer made a step."""

SUMMARY = "summary"
"""Stands for a layer's name in reasons of values of the whole network."""

HEALTHY, OFF, NOT_JUDGED = "healthy", "off", "not judged"

ROLE_NAMES = {"operator": "hidden", "readout": "output", "embedding": "embedding", "vector": "vector"}
"""Role -> its name in displays; users may give roles by these names too."""
DENSE = frozenset({"operator", "readout"})
"""Roles of layers that map dense features; sometimes only a forward pass tells which of them is the readout."""
MATRICES = DENSE | {"embedding"}
"""Roles of layers that have spectral norms."""
NODE = "node"
"""Role of a module that has features only."""


class LossFault(IntEnum):
    """A fault of the input of a loss: the values of ``summary/unfit_loss_input``."""

    NONE = 0
    KIND = 1  # a loss of logits gets outputs of an activation, or a loss of log-probabilities other inputs
    ALL_PAIRS = 2  # outputs and targets are broadcast, so each output is compared with the targets of all samples
    OVER_SAMPLES = 3  # log-probabilities are normalized over the samples, not over the classes
    SEQUENCE = 4  # recurrent or attention modules of the network take the samples for the steps of a sequence
    TARGETS = 5  # targets of a binary cross entropy are not probabilities, so that it has no minimum
    REACH = 6  # targets of a regression are far outside the range of the activation before it
    PAIRS = 7  # batch norms normalize two values, and so give 1 and -1 whatever these are


class LayerState(NamedTuple):
    """The state of one layer at one measurement.

    Attributes:
        state: ``"healthy"``, ``"off"`` or ``"not judged"``.
        reason: why it is off or not judged, in a few words; empty for healthy layers.
    """

    state: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.state}: {self.reason}" if self.reason else self.state


@dataclass(frozen=True)
class LayerInfo:
    """One measured parameter.

    Attributes:
        name: module name, or parameter name where a module has several; without wrapper prefixes.
        role: ``"operator"``, ``"readout"``, ``"embedding"`` or ``"vector"``; ``"node"`` for the output of a module.
        fan_out: outputs; of one block, the largest, for a fused matrix or a grouped convolution.
        fan_in: inputs; 1 for embeddings and vectors.
        shape: of the parameter, the global one.
        blocks: matrices stacked in the parameter, measured one by one.
        placement: how the parameter is laid out over processes; ``"local"`` in a single one.
    """

    name: str
    role: str
    fan_out: int
    fan_in: int
    shape: tuple[int, ...]
    blocks: int = 1
    placement: str = "local"

    @property
    def is_matrix(self) -> bool:
        """True if spectral quantities are defined."""
        return self.role in MATRICES

    @property
    def is_dense(self) -> bool:
        """True if it maps dense features, and so is compared with others."""
        return self.role in DENSE


def counted(layers: Iterable[LayerInfo]) -> str:
    """Return the numbers of matrices, of vectors (biases and gains) and of nodes, if there are any.

    Example:
        >>> counted([LayerInfo("head", "readout", 10, 64, (10, 64)), LayerInfo("head.bias", "vector", 10, 1, (10,))])
        'matrices=1, vectors=1'
    """
    kinds = Counter("matrices" if info.is_matrix else f"{info.role}s" for info in layers)
    names = ["matrices", "vectors", *(["nodes"] if kinds["nodes"] else [])]
    return ", ".join(f"{name}={kinds[name]}" for name in names)


@dataclass(frozen=True)
class Measurement:
    """Every quantity of every layer at one optimizer step.

    Attributes:
        step: optimizer steps taken, this one included.
        layers: L rows.
        values: quantity -> (L,) float32 CPU tensor, NaN where it does not apply or could not be measured.
        summary: values of the whole network.
        verdicts: what is off, roots first, the worst first; empty before the measurement is judged.
        errors: quantity -> (L,) standard errors of values from a sample of the batch's rows, as estimates of the value
            from all rows; 0 where all rows were used.
        states: every matrix -> its :class:`LayerState`; empty before the measurement is judged.
        flags: every layer that was ever off -> 1 if it is off now, 0 if not.
        bands: quantity -> (L, 3): the lowest and the highest healthy value, and the reference between them; NaN for
            layers that are compared with nothing. It has judged quantities only.
        reasons: why values are NaN, and why a contribution is exactly 0 although a gradient arrives:
            ``"quantity/layer"``, with ``"*"`` for all quantities or all layers -> sentence.
            Read them with :meth:`why`; for a value of the whole network the layer is :data:`SUMMARY`.
    """

    step: int
    layers: tuple[LayerInfo, ...]
    values: dict[str, Tensor]
    summary: dict[str, float]
    verdicts: tuple[Verdict, ...] = ()
    reasons: dict[str, str] = field(default_factory=dict)
    flags: dict[str, float] = field(default_factory=dict)
    bands: dict[str, Tensor] = field(default_factory=dict)
    states: dict[str, LayerState] = field(default_factory=dict)
    errors: dict[str, Tensor] = field(default_factory=dict)

    @property
    def roots(self) -> tuple[Verdict, ...]:
        """Verdicts that name a cause; the others follow from them."""
        return tuple(verdict for verdict in self.verdicts if verdict.is_root)

    @property
    def is_corrected(self) -> bool:
        """True if a correction has changed a learning rate."""
        multipliers = self.values["lr_multiplier"].tolist() if "lr_multiplier" in self.values else []
        return any(multiplier != 1 for multiplier in multipliers if not math.isnan(multiplier))

    def value(self, quantity: str, layer: str) -> float:
        """Return one number; NaN where it does not apply.

        Raises:
            KeyError: unknown quantity or layer; the message suggests valid ones.
        """
        names = [info.name for info in self.layers]
        if quantity in names and layer in self.values:
            raise KeyError(f"the quantity comes first: value({layer!r}, {quantity!r})")
        if quantity not in self.values:
            hint = did_you_mean(quantity, self.values)
            raise KeyError(f"{quantity!r} was not measured{hint or '.'} Measured: {', '.join(self.values)}")
        return float(self.values[quantity][self._index(layer)])

    def __getitem__(self, layer: str) -> dict[str, float]:
        """Return every quantity of one layer: ``latest["net.2"]["update_natural"]``.

        Raises:
            KeyError: there is no such layer; the message suggests valid ones.
        """
        index = self._index(layer)
        return {key: float(column[index]) for key, column in self.values.items()}

    @cached_property
    def _indices(self) -> dict[str, int]:
        return {info.name: index for index, info in enumerate(self.layers)}

    def _index(self, layer: object) -> int:
        if isinstance(layer, str) and layer in self._indices:
            return self._indices[layer]
        names = list(self._indices)
        if layer in self.values:
            raise KeyError(f"{layer!r} is a quantity: values[{layer!r}] has a number for each layer")
        if isinstance(layer, tuple):
            raise KeyError(f"one layer at a time, such as [{names[-1]!r}]; one number is value(quantity, layer)")
        raise KeyError(unknown("layer", layer, names))

    def why(self, quantity: str, layer: str = SUMMARY) -> str:
        """Return why a value is NaN; empty where no reason is known.

        Args:
            quantity: key of :attr:`values`, or without a layer of :attr:`summary`.
            layer: its name.

        Raises:
            KeyError: there is no such quantity or layer; the message suggests valid ones.
        """
        measured = quantity in self.values or quantity in self.summary
        if layer != SUMMARY and not measured and quantity not in QUANTITIES:
            self._index(layer)
            raise KeyError(unknown("quantity", quantity, [*self.values, *self.summary]))
        for key in (f"{quantity}/{layer}", f"*/{layer}", f"{quantity}/*", "*/*"):
            if key in self.reasons:
                return self.reasons[key]
        if layer != SUMMARY:
            self._index(layer)
        if measured:
            return ""
        return f"{quantity} was not measured at this step{did_you_mean(quantity, [*self.values, *self.summary])}"

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one plain dict per layer: step, the layer's description and every quantity as a float."""
        columns = {key: tensor.tolist() for key, tensor in self.values.items()}
        return [
            {
                "step": self.step,
                "layer": info.name,
                "role": info.role,
                "fan_out": info.fan_out,
                "fan_in": info.fan_in,
                "blocks": info.blocks,
                **{key: column[i] for key, column in columns.items()},
            }
            for i, info in enumerate(self.layers)
        ]

    def to_pandas(self) -> Any:
        """Return a ``pandas.DataFrame`` in long format: step, layer, role, quantity, value; NaN has no row.

        Raises:
            ImportError: pandas is not installed.
        """
        from spectral_monitor.reporting.files.long_format import frame, long_rows

        return frame(long_rows([self]))

    def scalars(self, prefix: str = "spectral") -> dict[str, float]:
        """Return all finite values as one flat dict: ``spectral/<quantity>/<layer>``, ``spectral/summary/<name>`` and,
        for layers that were ever off, ``spectral/violation/<layer>``.
        """
        flat = {
            f"{prefix}/{key}/{info.name}": value
            for key, tensor in self.values.items()
            for info, value in zip(self.layers, tensor.tolist(), strict=True)
            if math.isfinite(value)
        }
        flat |= {f"{prefix}/summary/{key}": value for key, value in self.summary.items() if math.isfinite(value)}
        return flat | {f"{prefix}/violation/{layer}": value for layer, value in self.flags.items()}

    def table(self, *, folded: bool = True) -> str:
        """Return the measurement as text: what is off first, healthy layers of deep networks in one line.

        Args:
            folded: ``False`` for a row for every matrix.
        """
        from spectral_monitor.reporting.text.table import measurement_table

        return measurement_table(self, folded)

    def _repr_html_(self) -> str:
        from spectral_monitor.reporting.text.notebook import html_table
        from spectral_monitor.reporting.text.table import measurement_rows

        return html_table(measurement_rows(self))

    def __repr__(self) -> str:
        return f"Measurement(step={self.step}, {counted(self.layers)}, quantities={len(self.values)})"


class History(deque[Measurement]):
    """The newest measurements, the oldest one first: a deque that has slices.

    Example:
        >>> history = History([], maxlen=2)
        >>> history.extend([Measurement(step, (), {}, {}) for step in (1, 2, 3)])
        >>> [measurement.step for measurement in history[-2:]], history[-1].step
        ([2, 3], 3)
    """

    @overload
    def __getitem__(self, index: SupportsIndex, /) -> Measurement: ...

    @overload
    def __getitem__(self, index: slice, /) -> list[Measurement]: ...

    def __getitem__(self, index: SupportsIndex | slice, /) -> Measurement | list[Measurement]:
        """Return one of them, or a list of several."""
        return list(self)[index] if isinstance(index, slice) else super().__getitem__(index)
