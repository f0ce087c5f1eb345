"""Measured numbers of one layer, as formulas read them. Torch is imported only where it is used."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

Norm = Literal["sigma", "fro"]
Values: TypeAlias = "tuple[float, ...] | Tensor"
"""Numbers on the host; many are a float64 tensor."""

RATIOS = frozenset(
    {"alignment", "update_alignment", "feature_change", "feature_drift", "feature_cancellation", "kernel_change"}
    | {"activation_ratio", "sample_share", "linearity", "kernel_drift", "kernel_alignment"}
    | {"feature_kurtosis", "outlier_ratio"}
    | {"output_drift_features", "output_drift_readout", "output_drift_joint"}
)
"""Numbers that divide by a norm: NaN where that is zero, which is no error."""


def sound(raw: Mapping[str, Values]) -> bool:
    """Return whether all measured numbers of a layer are finite, apart from ratios and standard errors."""
    return all(_finite(values) for name, values in raw.items() if name not in RATIOS and not name.endswith(".error"))


def _finite(values: Values) -> bool:
    return all(map(math.isfinite, values)) if isinstance(values, tuple) else bool(values.isfinite().all())


def _largest(values: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values, default=math.nan)


class Readings:
    """Measured numbers of one layer, combined over taps and blocks; NaN where something was not measured.

    Names are those of the notation: ``W``, ``dW``, ``drift`` (of ``W - W0``), ``W0``, ``W1`` (after the step), ``h``,
    ``dh``, ``b``, ``h_in``. Norms of a convolution's taps add up (an upper bound on the norm of all); of several blocks
    the largest value counts. Numbers are plain floats: there are thousands, and a tensor operation on each would cost
    more than all the matrices.
    """

    def __init__(
        self,
        raw: Mapping[str, Values],
        role: str,
        fan_in: int,
        fan_outs: Sequence[int],
        settings: Mapping[str, float] | None = None,
    ) -> None:
        """``fan_outs``: one for each block; ``settings``: of the optimizer, which :meth:`get` returns too."""
        self.raw = raw
        self._role, self._fan_in, self._fan_outs = role, fan_in, fan_outs
        self._settings = settings or {}
        self._blocks = len(fan_outs)

    def get(self, name: str) -> float:
        """Return a single number, or a setting of the optimizer; NaN if it was not measured."""
        if name in self._settings:
            return self._settings[name]
        value = self.raw.get(name)
        return math.nan if value is None else float(value[0])

    def largest(self, name: str) -> float:
        """Return the largest of several numbers; NaN if one of them is NaN or none was measured."""
        values = self.raw.get(name, ())
        return _largest(values) if isinstance(values, tuple) else float(values.amax())

    def index_of_largest(self, name: str) -> float:
        """Return the index of the largest of several numbers; NaN if one of them is NaN or none was measured."""
        values = list(map(float, self.raw.get(name, ())))
        return math.nan if math.isnan(_largest(values)) else float(values.index(max(values)))

    def _by_block(self, name: str) -> Tensor:
        """Return values (taps, blocks), NaN if not measured."""
        import torch

        values = self.raw.get(name)
        if values is None:
            return torch.full((1, self._blocks), math.nan, dtype=torch.float64, device="cpu")
        return torch.as_tensor(values, dtype=torch.float64, device="cpu").view(-1, self._blocks)

    def _norms(self, name: str, norm: Norm) -> Sequence[float]:
        """Return the norm of each block."""
        values = self.raw.get(f"{name}.{norm}")
        if values is None:
            return [math.nan] * self._blocks
        if len(values) == self._blocks:  # a single tap
            return values if isinstance(values, tuple) else values.tolist()
        taps = self._by_block(f"{name}.{norm}")
        blocks = taps.sum(0) if norm == "sigma" else _length(taps, dim=0)
        norms: list[float] = blocks.tolist()
        return norms

    def norm(self, name: str, norm: Norm = "sigma") -> float:
        """Return the spectral or the Frobenius norm."""
        return _largest(self._norms(name, norm))

    def gradient_natural(self) -> float:
        """Return the spectral norm of the gradient in units that are dual to those of the natural norm."""
        pairs = zip(self._fan_outs, self._norms("g", "sigma"), strict=True)
        return _largest([math.sqrt(fan_out / self._fan_in) * norm for fan_out, norm in pairs])

    def natural(self, name: str) -> float:
        """Return the natural norm, as the layer's role defines it; blocks have fans of their own."""
        if self._role == "embedding":
            return self.get(f"{name}.row")
        pairs = zip(self._fan_outs, self._norms(name, "sigma"), strict=True)
        return _largest([math.sqrt(self._fan_in / fan_out) * norm for fan_out, norm in pairs])

    def total_frobenius(self, name: str) -> float:
        """Return the Frobenius norm over all taps and blocks."""
        values = self.raw.get(f"{name}.fro")
        if values is None:
            return math.nan
        return math.hypot(*values) if isinstance(values, tuple) else float(_length(values))

    def radial_change(self) -> float:
        """Return the part of the update along the weight, from its product with the weight after the step."""
        length = self.total_frobenius("W")
        return (self.get("W1.dW") - self.total_frobenius("dW") ** 2) / length if length else math.nan

    def ratio(self, numerator: str, denominator: str, norm: Norm = "sigma") -> float:
        """Return a norm over a norm."""
        pairs = zip(self._norms(numerator, norm), self._norms(denominator, norm), strict=True)
        return _largest([a / b if b > 0 else math.nan for a, b in pairs])

    def stable_rank(self, name: str) -> float:
        """Return the stable rank; zero taps and blocks have none and are left out."""
        if len(self.raw.get(f"{name}.sigma", ())) == 1:
            return self.row_stable_rank(name)
        sigma, fro = (self.raw.get(f"{name}.{norm}", ()) for norm in ("sigma", "fro"))
        if isinstance(sigma, tuple) and isinstance(fro, tuple):
            return _largest([(f / s) ** 2 for s, f in zip(sigma, fro, strict=True) if s != 0])
        sigma, fro = self._by_block(f"{name}.sigma"), self._by_block(f"{name}.fro")
        ranks = (fro / sigma)[sigma != 0].square()
        return float(ranks.amax()) if ranks.numel() else math.nan

    def alignment(self, name: str) -> float:
        """Return the mean over taps, of the block where it is largest; taps and blocks without one are left out."""
        values: Values = self.raw.get(name, ())
        if len(values) == 1:
            return float(values[0])
        if isinstance(values, tuple) and values:
            blocks = [[x for x in values[k :: self._blocks] if not math.isnan(x)] for k in range(self._blocks)]
            return max((sum(taps) / len(taps) for taps in blocks if taps), default=math.nan)
        means = self._by_block(name).nanmean(0)
        means = means[~means.isnan()]
        return float(means.amax()) if means.numel() else math.nan

    def row_stable_rank(self, name: str) -> float:
        """Return the stable rank of a matrix of rows; NaN for a single row, where it is always 1."""
        sigma = self.get(f"{name}.sigma") if self.get(f"{name}.rows") != 1 else math.nan
        return (self.get(f"{name}.fro") / sigma) ** 2 if sigma > 0 else math.nan

    def cancellation(self, after: str, before: str, change: str) -> float:
        """Return the norm of a sum over the sum of the norms, of the block where most is cancelled."""
        blocks = zip(*(self._norms(name, "sigma") for name in (after, before, change)), strict=True)
        ratios = [a / (b + c) if b + c > 0 else math.nan for a, b, c in blocks]
        return math.nan if any(math.isnan(value) for value in ratios) else min(*ratios, 1.0)

    def speed(self, name: str) -> float:
        """Return the length of the change of a vector over that of the vector."""
        return self.quotient(f"d{name}.norm", f"{name}.norm")

    def kernel_ratio(self, name: str = "K") -> float:
        """Return the first moment of a kernel over the root of the second."""
        first, second = self.get(f"{name}.1"), self.get(f"{name}.2")
        return min(first / math.sqrt(second), 1.0) if second > 0 else math.nan

    def quotient(self, numerator: str, denominator: str) -> float:
        """Return a single number over another; NaN where that is zero."""
        divisor = self.get(denominator)
        return self.get(numerator) / divisor if divisor else math.nan

    def root_mean_square(self, name: str) -> float:
        """Return the RMS of the entries of a matrix of rows."""
        size = self.get(f"{name}.size")
        return self.get(f"{name}.norm") / math.sqrt(size) if size else math.nan

    def cosine(self) -> float:
        """Return the cosine of the backward-feature angle."""
        lengths = self.get("b.compared") * self.get("dh.norm")
        return min(max(-self.get("b.dh") / lengths, -1.0), 1.0) if lengths else math.nan

    def part_of_change(self, name: str) -> float:
        """Return the RMS length of ``dW h'``, ``W dh'`` or ``dW dh'`` over that of ``h``."""
        length = self.get("h.norm") / math.sqrt(rows) if (rows := self.get("h.rows")) else math.nan
        squares = self.raw.get(name, (math.nan,))  # of each block, the mean over rows
        return math.sqrt(float(sum(squares))) / length if length else math.nan

    def dual_cosine(self) -> float:
        """Return the cosine of the angle between the features and minus the change of their gradients."""
        lengths = self.get("h.beside_db") * self.get("db.norm")
        return min(max(-self.get("db.h") / lengths, -1.0), 1.0) if lengths else math.nan

    def sensitivity(self) -> float:
        """Return the feature change per loss decrease; rows that were not compared count as the others do."""
        decrease = -self.get("b.dh") / self.get("dh.share")
        return self.root_mean_square("dh") / decrease if decrease else math.nan


def _length(values: Tensor, dim: int | None = None) -> Tensor:
    import torch

    length: Tensor = torch.linalg.vector_norm(values, dim=dim)
    return length
