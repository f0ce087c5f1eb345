"""A profile: the natural norms of a tuned run, layer by layer and step by step, in a JSON file.

Natural norms do not depend on width, so a narrow run that was tuned can be the reference of a wide one. The profile
also has fans and settings of the optimizer, because its learning rates may not suit another width or optimizer.
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from spectral_monitor.condition.optimizers.hyperparameters import Hyperparameters
from spectral_monitor.measurement import DENSE, LayerInfo, Measurement
from spectral_monitor.messages import joined

FORMAT, VERSION = "spectral_monitor profile", 2
KEYS = ("weight_natural", "update_natural", "lr")
EXACT, NUMBERS = ("optimizer", "family", "group"), ("peak", "eps", "momentum", "weight_decay")
"""Settings of each layer in a profile; numbers may be unknown."""
MAX_NAMES = 6
"""Largest number of layers of each kind in an error."""
EXPECTED = f"expected a file written by save_profile (JSON, format {FORMAT!r}, version {VERSION})"


class ProfilePoint(NamedTuple):
    """The values of :data:`KEYS` of one layer at one step of the tuned run."""

    weight_natural: float
    update_natural: float
    lr: float


@dataclass(frozen=True)
class Fans:
    """The sizes of one layer's matrices.

    Attributes:
        fan_in: inputs of one block; 1 for embeddings.
        fan_out: outputs of one block.
        taps: number of a convolution's matrices, whose norms are added up; 1 for others.
    """

    fan_in: int
    fan_out: int
    taps: int = 1

    @classmethod
    def of(cls, info: LayerInfo) -> Fans:
        """Return the fans of a layer.

        Example:
            >>> Fans.of(LayerInfo("conv", "operator", 16, 8, (32, 8, 3, 3), blocks=2))
            Fans(fan_in=8, fan_out=16, taps=9)
        """
        if not info.is_dense:
            return cls(info.fan_in, info.fan_out)
        entries = info.blocks * info.fan_in * info.fan_out  # an upper bound if blocks differ in size
        return cls(info.fan_in, info.fan_out, max(1, round(math.prod(info.shape) / max(1, entries))))

    @property
    def inputs(self) -> int:
        """The number of inputs that one output reads."""
        return self.fan_in * self.taps


@dataclass(frozen=True)
class Profile:
    """Natural norms and learning rates of a tuned run.

    Attributes:
        roles: layer -> role.
        steps: layer -> steps at which it was measured, in rising order.
        points: layer -> its norms and learning rate at these steps.
        fans: layer -> sizes of its matrices.
        settings: layer -> those settings of its optimizer that are in :data:`EXACT` and :data:`NUMBERS`; layers whose
            optimizer was unknown are missing.

    Example:
        >>> points = (ProfilePoint(1.0, 0.1, 0.1), ProfilePoint(1.0, 0.001, 0.001))
        >>> profile = Profile({"head": "readout"}, {"head": (10, 30)}, {"head": points})
        >>> round(profile.at(20, "head").update_natural, 6)
        0.01
        >>> profile.at(1000, "head").lr
        0.001
    """

    roles: Mapping[str, str]
    steps: Mapping[str, Sequence[int]]
    points: Mapping[str, Sequence[ProfilePoint]]
    fans: Mapping[str, Fans] = field(default_factory=dict)
    settings: Mapping[str, Hyperparameters] = field(default_factory=dict)

    def at(self, step: int, layer: str) -> ProfilePoint:
        """Return the point of a layer at a step.

        Between two steps logarithms are interpolated; before the first and after the last their values hold.

        Raises:
            KeyError: the layer is unknown; the error lists the valid ones.
        """
        if layer not in self.roles:
            raise KeyError(f"the profile has no layer {layer!r}; layers: {', '.join(self.roles)}")
        steps, points = self.steps[layer], self.points[layer]
        i = bisect_right(steps, step)
        if i in (0, len(steps)):
            return points[max(i - 1, 0)]
        share = (step - steps[i - 1]) / (steps[i] - steps[i - 1])
        return ProfilePoint(*(_between(*pair, share) for pair in zip(points[i - 1], points[i], strict=True)))

    def covers(self, step: int, layer: str) -> bool:
        """Return whether a step lies within the measured steps of the tuned run."""
        steps = self.steps.get(layer, ())
        return bool(steps) and steps[0] <= step <= steps[-1]

    @property
    def lacks(self) -> str:
        """A sentence on what cannot be compared with this profile and why; empty if nothing is missing.

        Example:
            >>> Profile({}, {}, {}, fans={"head": Fans(8, 2)}).lacks
            'the profile holds no optimizer family: the optimizer cannot be compared; save it again to add that'
        """
        if self.settings:
            return ""
        return "the profile holds no optimizer family: the optimizer cannot be compared; save it again to add that"

    def check(self, layers: Iterable[LayerInfo], settings: Mapping[str, Hyperparameters] | None = None) -> None:
        """Refuse to be the reference of another model or of another kind of optimizer; widths may differ.

        ``settings``: layer -> settings of its optimizer in that run; unknown families are not compared.

        Raises:
            ValueError: with the layers that are missing, have other roles, or are trained by an optimizer of another
                family.
        """
        roles = {info.name: info.role for info in layers if info.is_matrix}
        differences = {
            "only in the model": [name for name in roles if name not in self.roles],
            "only in the profile": [name for name in self.roles if name not in roles],
            "of another role": [
                f"{name} ({role}, in the profile {self.roles[name]})"
                for name, role in roles.items()
                if _kind(role) != _kind(self.roles.get(name, role))
            ],
        }
        clauses = [f"{kind}: {joined(names, MAX_NAMES)}" for kind, names in differences.items() if names]
        if clauses:
            raise ValueError(f"the profile belongs to another model: {'; '.join(clauses)}")
        self._check_families(roles, settings or {})

    def _check_families(self, layers: Iterable[str], settings: Mapping[str, Hyperparameters]) -> None:
        differing, valid = [], set()
        for name in layers:
            own, tuned = settings.get(name), self.settings.get(name)
            if own and tuned and own.family and tuned.family and own.family != tuned.family:
                differing.append(f"{name} ({own.optimizer}, family {own.family!r})")
                valid.add(f"{tuned.family!r} (the profile's {tuned.optimizer})")
        if differing:
            raise ValueError(
                f"the profile belongs to another optimizer family: {joined(differing, MAX_NAMES)}; "
                f"valid: {', '.join(sorted(valid))}, or a profile of a run with this optimizer"
            )


def _kind(role: str) -> str:
    return "dense" if role in DENSE else role


def _between(first: float, second: float, share: float) -> float:
    if min(first, second) <= 0:  # a learning rate may be 0
        return first + share * (second - first)
    return math.exp((1 - share) * math.log(first) + share * math.log(second))


def save_profile(
    measurements: Iterable[Measurement],
    path: str | os.PathLike[str],
    settings: Mapping[str, Hyperparameters] | None = None,
) -> None:
    """Write the natural norms, learning rates, fans and optimizer settings of a run as JSON.

    Values that are not finite, updates of 0, learning rates that were multiplied by 0, and measurements of other
    quantities are left out. So are biases and gains.

    Args:
        measurements: measurements of one run, in any order.
        path: path of the file, which is replaced if it exists.
        settings: layer -> settings of its optimizer; those that govern the size of its updates are saved.

    Raises:
        ValueError: there are no measurements, none has all of ``weight_natural``, ``update_natural`` and ``lr``, or a
            matrix was never updated.
    """
    all_measurements = list(measurements)
    if not all_measurements:
        raise ValueError("a profile needs at least one measurement")
    quantities = {key for measurement in all_measurements for key in measurement.values}
    missing = [key for key in KEYS if key not in quantities]
    if missing:
        raise ValueError(f"a profile needs {', '.join(KEYS)}; not measured: {', '.join(missing)}")
    needed = {*KEYS, "lr_multiplier"} & quantities
    complete = [measurement for measurement in all_measurements if measurement.values.keys() >= needed]
    if not complete:
        raise ValueError(f"a profile needs {', '.join(sorted(needed))} at the same steps; give them one interval")
    layers: dict[str, dict[str, Any]] = {}
    for measurement in sorted(complete, key=lambda measurement: measurement.step):
        step, columns = measurement.step, measurement.values
        for i, info in enumerate(measurement.layers):
            if not info.is_matrix:
                continue
            layer = layers.setdefault(info.name, _new_entry(info, (settings or {}).get(info.name)))
            values = [float(columns[key][i]) for key in KEYS]
            if "lr_multiplier" in columns:  # save the scheduled rate, without the correction
                multiplier = float(columns["lr_multiplier"][i])
                values[2] = values[2] / multiplier if multiplier else math.nan
            if all(map(math.isfinite, values)) and values[1] > 0 and step not in layer["steps"][-1:]:
                layer["steps"].append(step)
                for key, value in zip(KEYS, values, strict=True):
                    layer[key].append(value)
    idle = [name for name, layer in layers.items() if not layer["steps"]]
    if idle:
        raise ValueError(
            f"no update of {joined(idle, MAX_NAMES)} was measured: a profile may have no frozen layers, so train or "
            "exclude them"
        )
    text = json.dumps({"format": FORMAT, "version": VERSION, "layers": layers}, indent=1)
    target = Path(path)
    part = target.with_name(target.name + ".part")
    part.write_text(text)
    part.replace(target)  # never half a profile


def _new_entry(info: LayerInfo, setting: Hyperparameters | None) -> dict[str, Any]:
    """Return a layer's entry in the file, without measured values."""
    fans = Fans.of(info)
    entry: dict[str, Any] = {"role": info.role, "fan_in": fans.fan_in, "fan_out": fans.fan_out, "taps": fans.taps}
    if setting is not None and setting.optimizer:
        numbers = {key: getattr(setting, key) for key in NUMBERS}
        finite = {key: number if math.isfinite(number) else None for key, number in numbers.items()}  # JSON has no NaN
        entry["settings"] = {key: getattr(setting, key) for key in EXACT} | finite
    return entry | {"steps": []} | {key: [] for key in KEYS}


def load_profile(path: str | os.PathLike[str]) -> Profile:
    """Read a profile.

    Raises:
        ValueError: there is no such file, or it is not a complete profile of this version.
    """
    try:
        data = json.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"profile {str(path)!r} cannot be read ({error.strerror}); {EXPECTED}") from None
    except ValueError as error:
        raise ValueError(f"profile {str(path)!r} is not JSON or was cut off ({error}); {EXPECTED}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"{str(path)!r} is not a profile; {EXPECTED}")
    if data.get("version") != VERSION:
        raise ValueError(f"profile {str(path)!r} has version {data.get('version')!r}; {EXPECTED}")
    try:
        return _parsed(data["layers"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"profile {str(path)!r} is damaged ({type(error).__name__}: {error}); {EXPECTED}") from None


def _parsed(layers: Mapping[str, Mapping[str, Any]]) -> Profile:
    steps = {name: tuple(map(int, layer["steps"])) for name, layer in layers.items()}
    points = {
        name: tuple(ProfilePoint(*map(float, values)) for values in zip(*(layer[key] for key in KEYS), strict=True))
        for name, layer in layers.items()
    }
    for name, of_layer in steps.items():
        if not of_layer or list(of_layer) != sorted(set(of_layer)) or len(of_layer) != len(points[name]):
            raise ValueError(f"the steps of {name} are none, not rising, or not as many as its values")
        if not all(math.isfinite(value) for point in points[name] for value in point):
            raise ValueError(f"values of {name} are not finite")
    if not steps:
        raise ValueError("it has no layers")
    roles = {name: str(layer["role"]) for name, layer in layers.items()}
    fans = {name: _fans(name, layer) for name, layer in layers.items()}
    settings = {name: _setting(layer["settings"]) for name, layer in layers.items() if "settings" in layer}
    return Profile(roles, steps, points, fans, settings)


def _fans(name: str, layer: Mapping[str, Any]) -> Fans:
    fans = Fans(int(layer["fan_in"]), int(layer["fan_out"]), int(layer["taps"]))
    if min(fans.fan_in, fans.fan_out, fans.taps) < 1:
        raise ValueError(f"the fans of {name} are not positive")
    return fans


def _setting(entry: Mapping[str, Any]) -> Hyperparameters:
    numbers: dict[str, Any] = {key: math.nan if entry[key] is None else float(entry[key]) for key in NUMBERS}
    return Hyperparameters(str(entry["optimizer"]), str(entry["family"]), int(entry["group"]), **numbers)
