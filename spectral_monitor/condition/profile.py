"""A profile: how large the natural norms of a tuned run were, layer by layer and step by step, in a JSON file.

Natural norms do not depend on width, so a narrow run that was tuned can serve as the reference of a wide one.
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spectral_monitor.anatomy.names import some
from spectral_monitor.measurement import LayerInfo, Measurement

FORMAT, VERSION = "spectral_monitor profile", 1
KEYS = ("weight_natural", "update_natural", "lr")
NAMED = 6
"""Layers that a refusal names of each kind."""
EXPECTED = f"expected a file written by save_profile (JSON, format {FORMAT!r}, version {VERSION})"


@dataclass(frozen=True)
class Point:
    """Where the tuned run was: of one layer at one step."""

    weight_natural: float
    update_natural: float
    lr: float


@dataclass(frozen=True)
class Profile:
    """Natural norms and learning rates of a tuned run.

    Attributes:
        roles: layer -> role.
        steps: layer -> steps it was measured at, rising.
        points: layer -> what was measured there.

    Example:
        >>> points = (Point(1.0, 0.1, 0.1), Point(1.0, 0.001, 0.001))
        >>> profile = Profile({"head": "readout"}, {"head": (10, 30)}, {"head": points})
        >>> round(profile.at(20, "head").update_natural, 6)
        0.01
        >>> profile.at(1000, "head").lr
        0.001
    """

    roles: Mapping[str, str]
    steps: Mapping[str, Sequence[int]]
    points: Mapping[str, Sequence[Point]]

    def at(self, step: int, layer: str) -> Point:
        """Between two steps their logarithms are interpolated; before the first and beyond the last those hold.

        Raises:
            KeyError: unknown layer, with the valid ones.
        """
        if layer not in self.roles:
            raise KeyError(f"the profile has no layer {layer!r}; layers: {', '.join(self.roles)}")
        steps, points = self.steps[layer], self.points[layer]
        i = bisect_right(steps, step)
        if i in (0, len(steps)):
            return points[max(i - 1, 0)]
        share = (step - steps[i - 1]) / (steps[i] - steps[i - 1])
        pairs = [(getattr(points[i - 1], key), getattr(points[i], key)) for key in KEYS]
        return Point(*(_between(*pair, share) for pair in pairs))

    def check(self, layers: Iterable[LayerInfo]) -> None:
        """Refuse to be the reference of another model; widths may differ.

        Raises:
            ValueError: layers that are missing, or have other roles, by name.
        """
        here = {info.name: info.role for info in layers if info.role != "vector"}
        found = {
            "only in the model": [name for name in here if name not in self.roles],
            "only in the profile": [name for name in self.roles if name not in here],
            "of another role": [
                f"{name} ({role}, in the profile {self.roles[name]})"
                for name, role in here.items()
                if self.roles.get(name, role) != role
            ],
        }
        differing = [f"{what}: {some(names, NAMED)}" for what, names in found.items() if names]
        if differing:
            raise ValueError(f"the profile is of another model: {'; '.join(differing)}")


def _between(first: float, second: float, share: float) -> float:
    if first <= 0 or second <= 0:  # a learning rate may be 0
        return first + share * (second - first)
    return math.exp((1 - share) * math.log(first) + share * math.log(second))


def save_profile(measurements: Iterable[Measurement], path: str | os.PathLike[str]) -> None:
    """Write the natural norms and learning rates of a run as JSON.

    What is not finite, an update of 0, a learning rate that was multiplied by 0, and measurements of other quantities
    are left out. Biases and gains are not part of it.

    Raises:
        ValueError: nothing measured, or never ``weight_natural``, ``update_natural`` and ``lr`` at one step; a matrix
            that never had an update.
    """
    given = list(measurements)
    if not given:
        raise ValueError("a profile needs at least one measurement")
    known = {key for m in given for key in m.values}
    missing = [key for key in KEYS if key not in known]
    if missing:
        raise ValueError(f"a profile needs {', '.join(KEYS)}; not measured: {', '.join(missing)}")
    needed = {*KEYS, "lr_multiplier"} & known
    taken = [m for m in given if m.values.keys() >= needed]
    if not taken:
        raise ValueError(f"a profile needs {', '.join(sorted(needed))} at the same steps; give them one interval")
    layers: dict[str, dict[str, Any]] = {}
    for m in sorted(taken, key=lambda m: m.step):
        for i, info in enumerate(m.layers):
            if info.role == "vector":
                continue
            layer = layers.setdefault(info.name, {"role": info.role, "steps": [], **{key: [] for key in KEYS}})
            values = [float(m.values[key][i]) for key in KEYS]
            if "lr_multiplier" in m.values:  # what was scheduled, not what a correction made of it
                multiplier = float(m.values["lr_multiplier"][i])
                values[2] = values[2] / multiplier if multiplier else math.nan
            if all(map(math.isfinite, values)) and values[1] > 0 and m.step not in layer["steps"][-1:]:
                layer["steps"].append(m.step)
                for key, value in zip(KEYS, values, strict=True):
                    layer[key].append(value)
    idle = [name for name, layer in layers.items() if not layer["steps"]]
    if idle:
        raise ValueError(f"no update was measured of {some(idle, NAMED)}: freeze no layer in a profile, or exclude it")
    text = json.dumps({"format": FORMAT, "version": VERSION, "layers": layers}, indent=1)
    target = Path(path)
    part = target.with_name(target.name + ".part")
    part.write_text(text)
    part.replace(target)  # never half a profile


def load_profile(path: str | os.PathLike[str]) -> Profile:
    """Read a profile back.

    Raises:
        ValueError: no such file, not a whole profile, or one of another version.
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
        name: tuple(Point(*map(float, values)) for values in zip(*(layer[key] for key in KEYS), strict=True))
        for name, layer in layers.items()
    }
    for name, taken in steps.items():
        if not taken or list(taken) != sorted(set(taken)) or len(taken) != len(points[name]):
            raise ValueError(f"the steps of {name} are none, not rising, or not as many as its values")
        if not all(math.isfinite(getattr(p, key)) for p in points[name] for key in KEYS):
            raise ValueError(f"values of {name} are not finite")
    if not steps:
        raise ValueError("it has no layers")
    return Profile({name: str(layer["role"]) for name, layer in layers.items()}, steps, points)
