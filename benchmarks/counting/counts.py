"""What one measured step does, counted: the same numbers on a fast machine and on a slow one.

    python -m benchmarks.counting.counts  # tiers light and standard of a small transformer, and who reads what

Every operator that torch runs is seen in a measured step, and in a plain one beside it; what is reported is the
difference. What an operator needs inside (the workspace of an eigenvalue routine) is not seen.
"""

from __future__ import annotations

import argparse
import functools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, autograd, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import spectral_monitor
from benchmarks.char_transformer import CharTransformer
from benchmarks.counting.contents import WRITES_ONLY, Contents, basic, read_bytes, tensors_in
from spectral_monitor import SpectralProbe
from spectral_monitor.linalg.lanczos import KrylovSpace

PACKAGE = Path(spectral_monitor.__file__).parent
CROSSINGS = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "cpu", "numpy", "nonzero", "to")
"""Methods that on an accelerator wait for the device; ``to`` where it goes to the host."""
ON_HOST = (
    *(f"engine/results/{name}" for name in ("reasons.py", "summary.py", "values.py")),
    *(f"engine/results/measurement.py:{name}" for name in ("relative_errors", "known_errors")),
    *("condition/", "correction/", "reporting/"),
    *("engine/results/noise.py", "functional/noise.py", "engine/attention/logits.py:<"),
    *("linalg/spectral_norms.py:_decided", "engine/results/raw.py:_unpacked"),
)
"""Code that works on numbers that have arrived."""
PICKS = frozenset({"index_select", "index", "embedding", "gather"})
"""These read of their first argument only what they return."""


@dataclass
class Tally:
    """Of one step. Bytes read are those of operators' arguments."""

    operators: Counter[str] = field(default_factory=Counter)
    read: Counter[str] = field(default_factory=Counter)
    crossings: Counter[str] = field(default_factory=Counter)
    allocations: int = 0
    allocated: int = 0
    peak: int = 0
    forwards: int = 0
    backwards: int = 0


@dataclass(frozen=True)
class Counts:
    """What a measured step does beyond a plain one.

    Attributes:
        operators: that compute something; views and empty memory are none.
        read: bytes they read.
        operators_fixed, read_fixed: without those of norms, whose number of steps depends on the matrices.
        allocations, allocated: tensors with memory of their own, and its bytes.
        peak: bytes by which the most memory ever in use is more.
        crossings: waits for the device, or copies from it.
        forwards: of the whole model.
        backwards: passes of automatic differentiation, through all of the model or a part.
        passes: (``W``, ``dW`` or ``drift``, parameter) -> how often its entries are read; making a copy included.
        steps: of Lanczos made on the same; where a parameter has several matrices, the most.
        functions: file and function -> operators and bytes.
        readers: (matrix, parameter) -> file and function -> passes.
        defined: quantities that have a value in any layer.
    """

    operators: int
    read: int
    operators_fixed: int
    read_fixed: int
    allocations: int
    allocated: int
    peak: int
    crossings: int
    forwards: int
    backwards: int
    passes: dict[tuple[str, str], float]
    steps: dict[tuple[str, str], int]
    functions: dict[str, tuple[int, int]]
    readers: dict[tuple[str, str], dict[str, float]]
    defined: frozenset[str] = frozenset()


@functools.cache
def _place(code: CodeType) -> str:
    path = Path(code.co_filename)
    return f"{path.relative_to(PACKAGE).as_posix()}:{code.co_name}" if path.is_relative_to(PACKAGE) else ""


def place() -> str:
    """The innermost function of the package that is running, ``""`` if none is."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if function := _place(frame.f_code):
            return function
        frame = frame.f_back
    return ""


def is_index(t: Tensor) -> bool:
    """Return whether a tensor holds whole numbers, as indices do, which are made on the host."""
    return not t.is_floating_point() and t.dtype != torch.bool


class Operators(TorchDispatchMode):
    """Sees every operator."""

    def __init__(self) -> None:
        super().__init__()
        self.contents = Contents()
        self.tally = Tally()
        self.live = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        schema = func._schema
        arguments = list(zip(schema.arguments, args, strict=False))
        arguments += [(argument, kwargs[argument.name]) for argument in schema.arguments if argument.name in kwargs]
        written = [t for a, v in arguments if a.alias_info is not None and a.alias_info.is_write for t in tensors_in(v)]
        if not written and any(r.alias_info is not None for r in schema.returns):
            return result  # a view
        name = basic(schema.name)
        outputs = tensors_in(result)
        for t in outputs:
            self._allocated(t)
        if name.startswith(("empty", "new_empty")):
            return result
        reads = [
            t
            for a, v in arguments
            if a.alias_info is None or not a.alias_info.is_write or not (a.is_out or name in WRITES_ONLY)
            for t in tensors_in(v)
        ]
        function = place()
        self.tally.operators[function] += 1
        self.tally.read[function] += sum(map(read_bytes, [*outputs, *reads[1:]] if name in PICKS else reads))
        if function:
            self.contents.read(reads, function)
        self._follow(schema.name, name, args, kwargs, written or outputs)
        return result

    def _allocated(self, t: Tensor) -> None:
        storage = t.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._sizes or not size:
            return
        self._sizes[key] = size
        self.live += size
        self.tally.allocations += 1
        self.tally.allocated += size
        self.tally.peak = max(self.tally.peak, self.live)
        weakref.finalize(storage, self._freed, key).atexit = False

    def _freed(self, key: int) -> None:
        self.live -= self._sizes.pop(key)
        self.contents.forget(key)

    def _follow(self, full: str, name: str, args: Any, kwargs: Any, outputs: list[Tensor]) -> None:
        alpha = float(kwargs.get("alpha", 1))
        if "_foreach_" in full:
            sides = [side if isinstance(side, (tuple, list)) else [side] * len(outputs) for side in args]
            inputs = list(zip(*sides, strict=False))
        else:
            inputs = [args] * len(outputs)
        for operands, out in zip(inputs, outputs, strict=False):
            # Of a copy into a tensor only what comes after it is what is copied.
            copied = name == "copy" and len(operands) > 1 and isinstance(operands[1], Tensor)
            self.contents.write(name, operands[1:2] if copied else operands, alpha, out)


class Crossings(TorchFunctionMode):
    """Sees what goes from the device to the host."""

    def __init__(self, operators: Operators) -> None:
        super().__init__()
        self._operators = operators

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in CROSSINGS and args and isinstance(args[0], Tensor):
            home = name != "to" or any(isinstance(a, str) and a == "cpu" for a in (*args, *(kwargs or {}).values()))
            function = place()
            if home and function and not function.startswith(ON_HOST) and not is_index(args[0]):
                self._operators.tally.crossings[function] += 1
        return func(*args, **(kwargs or {}))


class Watch:
    """Counts steps of a model; everything it computes must happen inside ``with watch:``."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.operators = Operators()
        self.spaces: list[Counter[tuple[str, str]]] = []
        self._stack = ExitStack()

    def __enter__(self) -> Watch:
        self.operators.contents.watch(self.model.named_parameters())
        handle = register_module_forward_pre_hook(self._called)
        self._stack.callback(handle.remove)
        self._stack.enter_context(patch.object(KrylovSpace, "step", self._noted(KrylovSpace.step)))
        self._stack.enter_context(patch.object(autograd, "_engine_run_backward", self._went_back(autograd)))
        self._stack.enter_context(Crossings(self.operators))
        self._stack.enter_context(self.operators)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def _called(self, module: nn.Module, args: Any) -> None:
        self.operators.tally.forwards += module is self.model

    def _went_back(self, engine: Any) -> Callable[..., Any]:
        run = engine._engine_run_backward

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.operators.tally.backwards += 1
            return run(*args, **kwargs)

        return counted

    def _noted(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def noted(space: Any, *args: Any, **kwargs: Any) -> Any:
            if not hasattr(space, "noted"):
                space.noted = Counter()
                self.spaces.append(space.noted)
            matrices = (A for run in space.runs for part in run.A.parts for A in part.A)
            space.noted.update({key for A in matrices for key in self.operators.contents.names(A)})
            return step(space, *args, **kwargs)

        return noted

    @contextmanager
    def step(self) -> Iterator[Tally]:
        """Count what happens inside as one step."""
        operators = self.operators
        operators.contents.begin()
        self.spaces.clear()
        tally = operators.tally = Tally(peak=operators.live)
        begin = operators.live
        yield tally
        tally.peak -= begin

    def steps(self) -> dict[tuple[str, str], int]:
        """Return the steps of Lanczos in the last step, by matrix and parameter."""
        most: Counter[tuple[str, str]] = Counter()
        for steps in self.spaces:
            most |= steps
        return dict(most)


def count(model: nn.Module, optimizer: Optimizer, loss: Callable[[nn.Module], Tensor], **settings: Any) -> Counts:
    """Counts of the third measured step of a probe with these settings.

    Args:
        model, optimizer: what is trained.
        loss: runs the forward.
        settings: of :class:`SpectralProbe`; without ``drift_every`` the probe batch is not looked at again.
    """
    settings = {"every_n_steps": 1, "drift_every": 1000, "mode": "observe"} | settings

    def train() -> None:
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()

    watch = Watch(model)
    with watch:
        probe = SpectralProbe(model, optimizer, **settings)
        for _ in range(2):  # the first one finds out which outputs last
            with probe.step():
                train()
        with watch.step() as plain:
            train()
        with watch.step() as measured, probe.step():
            train()
        steps, passes = watch.steps(), watch.operators.contents.passes
    if len(probe.measurements) != 3:
        raise RuntimeError("a step was not measured")
    defined = {key for key, values in probe.measurements[-1].values.items() if bool(values.isfinite().any())}
    return replace(difference(measured, plain, passes, steps), defined=frozenset(defined))


def difference(
    measured: Tally, plain: Tally, passes: dict[tuple[str, str], Counter[str]], steps: dict[tuple[str, str], int]
) -> Counts:
    """Return what a measured step does beyond a plain one."""
    operators, read = Counter(measured.operators), Counter(measured.read)
    operators.subtract(plain.operators)
    read.subtract(plain.read)

    def fixed(counter: Counter[str]) -> int:
        return sum(n for function, n in counter.items() if not function.startswith("linalg/"))

    return Counts(
        operators=operators.total(),
        read=read.total(),
        operators_fixed=fixed(operators),
        read_fixed=fixed(read),
        allocations=measured.allocations - plain.allocations,
        allocated=measured.allocated - plain.allocated,
        peak=measured.peak - plain.peak,
        crossings=measured.crossings.total() - plain.crossings.total(),
        forwards=measured.forwards - plain.forwards,
        backwards=measured.backwards - plain.backwards,
        passes={key: sum(functions.values()) for key, functions in passes.items()},
        steps=steps,
        functions={function: (operators[function], read[function]) for function, _ in read.most_common()},
        readers={key: dict(functions) for key, functions in passes.items()},
    )


def beyond(counts: Counts) -> dict[tuple[str, str], float]:
    """By how much passes exceed twice the steps plus four, where they do.

    Steps are those of Lanczos; a small matrix has one, the product of it and its transpose.
    """
    bounds = {key: 2 * counts.steps.get(key, 1) + 4 for key in counts.passes}
    return {key: n - bounds[key] for key, n in counts.passes.items() if n > bounds[key] + 1e-6}


def report(name: str, counts: Counts) -> None:
    print(f"\n{name}: {counts.operators} operators read {counts.read / 1e6:.1f} MB,", end=" ")
    print(
        f"{counts.allocations} tensors of {counts.allocated / 1e6:.1f} MB, peak {counts.peak / 1e6:+.1f} MB,", end=" "
    )
    print(f"{counts.crossings} crossings, {counts.forwards} forwards")
    for function, (operators, read) in list(counts.functions.items())[:20]:
        print(f"  {function or '(the model)':50s} {operators:5d} operators {read / 1e6:9.2f} MB")
    for key, n in sorted(counts.passes.items(), key=lambda item: -item[1])[:12]:
        print(f"  {key[0]:5s} {key[1]:28s} {n:5.1f} passes, {counts.steps.get(key, 0)} steps of Lanczos", end="; ")
        print(", ".join(f"{reader.split('/')[-1]} {passes:.1f}" for reader, passes in counts.readers[key].items()))
    print(f"  beyond 2 x steps + 4: {beyond(counts) or 'none'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiers", nargs="+", default=["light", "standard"], help="what to measure")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--context", type=int, default=64)
    args = parser.parse_args()
    for tier in args.tiers:
        torch.manual_seed(0)
        model = CharTransformer(65, args.width, args.depth, 4, args.context)
        tokens = torch.randint(65, (2, args.batch_size, args.context))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        report(tier, count(model, optimizer, lambda model, tokens=tokens: model(*tokens), quantities=tier))


if __name__ == "__main__":
    main()
