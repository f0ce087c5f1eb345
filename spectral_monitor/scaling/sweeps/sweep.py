"""Sweeps: the same network, trained and measured at several widths or depths, and the growth of its numbers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from spectral_monitor.fitting.power_law import FEWEST
from spectral_monitor.parametrization.prediction import Axis
from spectral_monitor.parametrization.rules import Parametrization
from spectral_monitor.scaling.batches import SweepError
from spectral_monitor.scaling.sweeps import storage as points_file
from spectral_monitor.scaling.sweeps.arguments import integer, integers, positive
from spectral_monitor.scaling.sweeps.limit import LimitMethod, check_limit, exact_points
from spectral_monitor.scaling.sweeps.point import MakeModule, MakeOptimizer, RunKey, SweepConfig
from spectral_monitor.scaling.sweeps.result import SweepResult, evaluated
from spectral_monitor.scaling.sweeps.workers import Executor, check_executor, trained

NOT_SAVED = "give path=, and the same call trains only what is missing"
QUANTITIES = ("weight_natural", "update_natural", "feature_change")
"""Measured by default: the spectral condition of weights and updates, and the feature change that follows from it."""


def sweep(
    make_module: MakeModule,
    data: Any,
    *,
    widths: int | Sequence[int],
    depths: int | Sequence[int] | None = None,
    seeds: int | Sequence[int] = 5,
    steps: int = 10,
    quantities: str | Sequence[str] = QUANTITIES,
    parametrization: Parametrization | None = None,
    optimizer: str | MakeOptimizer | None = None,
    lr: float | None = None,
    measured: int | Sequence[int] | None = None,
    roles: Mapping[str, str] | None = None,
    blocks: Mapping[str, int] | None = None,
    processes: int = 1,
    executor: Executor | None = None,
    processes_per_point: int = 1,
    path: str | os.PathLike[str] | None = None,
    part: tuple[int, int] | None = None,
    progress: bool = True,
    limit: LimitMethod | None = None,
) -> SweepResult:
    r"""Train and measure a network at several widths, and fit the growth of each layer's quantities.

    Every network is trained for a few steps with a :class:`~spectral_monitor.SpectralProbe` around them. The value of
    each quantity at the last step is fitted by ``width^s``: for every seed a line on log-log axes, then the mean of the
    slopes and Student's 95 % interval. With a parametrization, the slope is compared with the one that theory predicts
    (:func:`~spectral_monitor.scaling.predict`), without one with 0. This is muP's coordinate check, with an answer in
    words. Biases and gains are left out.

    *Fitted values.* Layers are matched by name. A layer whose shape does not change with the width is fitted too,
    because others feed it; a note says so. Points whose loss becomes NaN or inf are left out, with the reason. So are
    values that are 0, NaN or inf, and widths that give the same shapes as another one. A quantity that may be negative
    is fitted by its size, if it has one sign everywhere. Fewer than three sizes give no slope.

    *Depth.* With at least three ``widths``, slopes are against width, at each of ``depths``. With fewer widths and at
    least three ``depths``, they are against depth, at each width, and predicted for one sample. Of layers whose names
    differ only by a number, the first, middle and last are followed.

    *Randomness.* Weights, data order and dropout follow from the seed; the order of the data does not depend on the
    width. Global random states are restored. Wherever and in whatever order points run, numbers are bitwise the same
    on machines of one type with the same number of threads. ``processes`` divide the threads of this process.

    Args:
        make_module: ``make_module(width)``, or ``make_module(width, depth)`` if depths are given, makes a module. Its
            loss on a batch is ``module.training_step(batch, i)`` if it has that (a LightningModule; no Trainer is
            needed, and its settings do not apply), else ``module(*batch)``: a scalar, or a dict with ``"loss"``.
        data: a DataLoader or another collection of batches, read again from its start when there are no more; a tuple
            or dict of tensors, which is the batch of every step; or a function of the seed that returns one of these.
        widths, depths: arguments of ``make_module``.
        seeds: their number, or a list. Intervals of three are twice as wide as those of five; with one seed they are
            from the residuals of the line, with n - 2 degrees of freedom.
        steps: optimizer steps each network is trained for.
        quantities: ``"light"``, ``"standard"`` or a list of keys, as for the probe.
        parametrization: redraws the weights and sets the learning rates, such as ``spectral_monitor.scaling.MUP``.
        optimizer: with a parametrization ``"sgd"`` (the default) or ``"adam"``; without, a function that makes the
            optimizer of a module, by default the module's ``configure_optimizers``. Schedulers with
            ``interval="step"`` are used, at their ``frequency``.
        lr: with a parametrization, the learning rate that it scales.
        measured: the steps that are measured, for :meth:`SweepResult.at`; by default the first and the last. The last
            of them is fitted. ``feature_drift`` is counted from the first.
        roles, blocks: pattern -> role or number of blocks, where the guess is wrong, as for the probe.
        processes: number of networks trained at the same time. With more than one, ``make_module``, ``data`` and
            ``optimizer`` must be picklable: functions at the top of a module, and the script guarded by
            ``if __name__ == "__main__"``.
        executor: runs the points instead: any ``concurrent.futures`` executor that does not fork, such as that of
            dask's ``client.get_executor()``. Other objects work if ``submit(function)`` returns one with ``done()``
            and ``result()``, such as submitit's executors. The sweep does not shut it down. Each point is trained with
            as many threads as this process has, or as its worker has CPUs if those are fewer.
        processes_per_point: number of processes that train each network together, started as torchrun does, wherever
            the point runs. ``make_module`` returns a network that is wrapped or sharded (DDP, FSDP2), and ``data`` the
            batches of this process. Both are called in each process, with an initialized process group and
            ``LOCAL_RANK`` set. Losses are means over processes.
        path: a file of JSON lines to which every finished point is added. Points in the file are not trained again; a
            file of other settings is refused.
        part: ``(i, n)``, i from 1 to n: train only the i-th of n parts, into its own file beside ``path``. A sweep of
            the same path without it collects the parts and trains missing points.
        progress: show progress on stderr.
        limit: also find values at infinite width, and the networks' distances from them. ``"extrapolated"``: from the
            widths, by ``q + c / n``, for any architecture; ``"exact"``: by :func:`~spectral_monitor.limits.twin`,
            with SGD and a parametrization, where all parameters are in an ``nn.Sequential`` of two linear layers.

    Returns:
        The points and their slopes: ``print`` shows a table, ``.figure()`` draws a picture.

    Raises:
        ValueError: an argument does not fit: fewer than three widths, a factory that ignores the width, a file of
            another sweep; the message names it.
        RuntimeError: your code raised an error, which is the cause; or points did not come back from their workers,
            and all others are done. The message names the points.

    Example:
        >>> import torch
        >>> class Net(torch.nn.Module):
        ...     def __init__(self, width):
        ...         super().__init__()
        ...         self.read, self.out = torch.nn.Linear(8, width), torch.nn.Linear(width, 1)
        ...     def forward(self, x, y):
        ...         return (self.out(self.read(x).relu()) - y).square().mean()
        >>> data = (torch.ones(4, 8), torch.ones(4, 1))
        >>> from spectral_monitor.scaling import SP
        >>> result = sweep(Net, data, widths=(64, 256, 1024), steps=1, quantities=["update_natural"],
        ...                parametrization=SP, optimizer="adam", lr=0.001, progress=False)
        >>> for slope in result.slopes:
        ...     print(f"{slope.layer}: predicted width^{slope.predicted:.1f}, {slope.verdict}")
        read: predicted width^0.0, as predicted
        out: predicted width^1.0, as predicted
    """
    recipe = SweepConfig(
        make_module,
        data,
        steps,
        quantities,
        measured,
        parametrization,
        optimizer,
        lr,
        roles,
        blocks,
        processes_per_point,
    )
    keys, axis = _keys(widths, depths, seeds)
    check_limit(limit, axis, recipe, depths)
    processes = positive("processes", processes)
    check_executor(executor, processes, recipe)
    target = None if path is None else Path(path)
    if part is not None and target is None:
        raise SweepError("part= needs path=, the file that joins the parts")
    part = None if part is None else _checked_part(part)
    own_keys = [key for i, key in enumerate(keys) if part is None or i % part[1] == part[0] - 1]
    points = {} if target is None else points_file.read(target, recipe.settings)
    missing = [key for key in own_keys if key not in points]
    if missing:
        _check_sizes(recipe, keys, axis, elsewhere=executor is not None or recipe.processes_per_point > 1)
    file = None if target is None else points_file.part_path(target, part)
    saved = f"the others are in {str(file)!r}, and the same call trains what is missing" if file else NOT_SAVED
    with (
        _progress(len(own_keys), len(own_keys) - len(missing), progress) as advance,
        closing(trained(recipe, missing, processes, executor, saved)) as new_points,
    ):
        for point in new_points:
            points[point.key] = point
            if file is not None:
                points_file.append(file, point, recipe.settings)
            advance(point.key)
    ordered = sorted(keys, key=lambda key: (key.depth or 0, key.width, key.seed))
    result = evaluated(recipe, ordered, points.values(), axis, recipe.measured_steps[-1])
    if limit == "exact":
        distinct_seeds = list(dict.fromkeys(key.seed for key in ordered))
        result = replace(result, exact=exact_points(recipe, ordered[0].width, distinct_seeds))
    return replace(result, limit=limit)


def _keys(
    widths: int | Sequence[int], depths: int | Sequence[int] | None, seeds: int | Sequence[int]
) -> tuple[list[RunKey], Axis]:
    """Return the keys of all points, the small ones first, and the axis of slopes."""
    all_widths, all_depths = _sizes("widths", widths), [None] if depths is None else _sizes("depths", depths)
    seed_count = integer(seeds)
    all_seeds = dict.fromkeys(integers(seeds) if seed_count is None else range(seed_count))
    if not all_seeds or min(all_seeds) < 0:
        raise SweepError(f"seeds must be how many (>= 1) or a list of integers >= 0, got {seeds!r}")
    axis: Axis = "depth" if len(all_widths) < FEWEST <= len(all_depths) else "width"
    if len(all_widths) < FEWEST and axis == "width":
        sizes = f"widths {', '.join(map(str, all_widths))}"
        sizes += "" if depths is None else f" and depths {', '.join(map(str, all_depths))}"
        raise SweepError(f"a slope needs {FEWEST} widths, or {FEWEST} depths, that differ; got {sizes}")
    return [RunKey(w, d, seed) for w in all_widths for d in all_depths for seed in all_seeds], axis


def _sizes(name: str, value: int | Sequence[int]) -> list[Any]:
    sizes = integers(value)
    if not sizes or min(sizes) < 1:
        raise SweepError(f"{name} must be integers >= 1, got {value!r}")
    return sorted(set(sizes))


def _checked_part(part: tuple[int, int]) -> tuple[int, int]:
    numbers = integers(part)
    if len(numbers) != 2 or not 1 <= numbers[0] <= numbers[1]:
        raise SweepError(f"part must be (i, n) with i from 1 to n, got {part!r}")
    return numbers[0], numbers[1]


def _check_sizes(recipe: SweepConfig, keys: Sequence[RunKey], axis: str, elsewhere: bool) -> None:
    """Build the two smallest networks, before any is trained.

    ``elsewhere``: points run in other processes; errors of the factory are left to them, for this process may lack
    their device.

    Raises:
        SweepError: the two have the same shapes.
    """
    small = keys[0]
    large = next(key for key in keys if key != small and key._replace(**{axis: getattr(small, axis)}) == small)
    try:
        same = recipe.shapes(small) == recipe.shapes(large)
    except SweepError:
        raise
    except Exception as error:
        if elsewhere:
            return
        raise RuntimeError(f"make_module, {small} or {large}: {type(error).__name__}: {error}") from error
    if same:
        sizes = f"{axis} {getattr(small, axis)} and {getattr(large, axis)}"
        raise SweepError(f"make_module ignores the {axis}: at {sizes} all parameters have the same shapes")


@contextmanager
def _progress(total: int, done: int, show: bool) -> Iterator[Callable[[RunKey], None]]:
    if not show or done == total:
        yield lambda key: None
        return
    from tqdm import tqdm  # type: ignore[import-untyped]  # Lightning depends on it

    with tqdm(total=total, initial=done, desc="sweep", unit="point") as bar:

        def advance(key: RunKey) -> None:
            bar.set_postfix_str(str(key), refresh=False)
            bar.update()

        yield advance
