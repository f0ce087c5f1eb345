"""Each metric, fed in batches, against one naive float64 pass over everything it was fed."""

from __future__ import annotations

import itertools
import math
import pickle
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from spectral_monitor.metrics import Alignment, BackwardFeatureAngle, FeatureChange, SpectralNorm, StableRank

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def gaussian(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def singular_values(matrices):
    stacks = [A.double().numpy().reshape(-1, *A.shape[-2:]) for (A,) in matrices]
    return [np.linalg.svd(A, compute_uv=False) for A in itertools.chain.from_iterable(stacks)]


def naive_alignment(batches):
    values = []
    for A, x in batches:
        A = A.double().numpy()
        norm = np.linalg.svd(A, compute_uv=False)[0]
        values += [np.linalg.norm(A @ row) / (norm * np.linalg.norm(row)) for row in x.double().numpy()]
    return np.mean(values)


def naive_change(batches):
    before, after = (torch.cat(column).double().numpy() for column in zip(*batches, strict=True))
    return np.mean([np.linalg.norm(a - b) / np.linalg.norm(b) for b, a in zip(before, after, strict=True)])


def naive_angle(batches):
    dh, b = (torch.cat(column).double().numpy().ravel() for column in zip(*batches, strict=True))
    return math.acos(-(dh @ b) / (np.linalg.norm(dh) * np.linalg.norm(b)))


def matrices(dtype):
    shapes = [(5, 9), (2, 30, 7), (3, 2, 4, 4), (1, 6)]
    return [(gaussian(*shape, dtype=dtype, seed=seed),) for seed, shape in enumerate(shapes)]


def weights_and_rows(dtype):
    """The weight changes between batches, the number of rows too."""
    rows = [1, 12, 5]
    return [(gaussian(6, 8, dtype=dtype, seed=k), gaussian(rows[k], 8, dtype=dtype, seed=9 + k)) for k in range(3)]


def pairs(dtype):
    rows = [2, 1, 9]
    return [
        (gaussian(rows[k], 8, dtype=dtype, seed=k), gaussian(rows[k], 8, dtype=dtype, seed=9 + k)) for k in range(3)
    ]


@dataclass(frozen=True)
class Case:
    metric: type[Metric]
    batches: Any
    naive: Any
    good: tuple[Tensor, ...]
    """Arguments with a value."""
    void: tuple[Tensor, ...]
    """Arguments that have no value and are left out."""
    bad: list[tuple[tuple[Tensor, ...], str]]
    """Arguments that are refused, and what the error must say."""


zeros, ones, integers = torch.zeros(3, 3), torch.ones(3, 3), torch.ones(3, 3, dtype=torch.int64)
no_matrix = [((ones[0],), r"A .*float32 \(3,\)"), ((integers,), r"A .*int64 \(3, 3\)")]
CASES = [
    Case(
        SpectralNorm,
        matrices,
        lambda batches: np.mean([s[0] for s in singular_values(batches)]),
        good=(ones,),
        void=(torch.zeros(0, 3, 3),),
        bad=no_matrix,
    ),
    Case(
        StableRank,
        matrices,
        lambda batches: np.mean([(s**2).sum() / s[0] ** 2 for s in singular_values(batches)]),
        good=(torch.eye(3),),
        void=(torch.zeros(2, 3, 3),),
        bad=no_matrix,
    ),
    Case(
        Alignment,
        weights_and_rows,
        naive_alignment,
        good=(torch.eye(3), ones),
        void=(ones, zeros),
        bad=[((ones, ones[0]), r"x .*\(3,\)"), ((ones, ones[:, :2]), r"A must be \(m, 2\) .*x \(3, 2\), got \(3, 3\)")],
    ),
    Case(
        FeatureChange,
        pairs,
        naive_change,
        good=(ones, 3 * ones),
        void=(zeros, ones),
        bad=[((ones, ones[:2]), r"h_before \(3, 3\) and h_after \(2, 3\)"), ((ones, integers), r"h_after .*int64")],
    ),
    Case(
        BackwardFeatureAngle,
        pairs,
        naive_angle,
        good=(-torch.eye(3), ones),
        void=(zeros, zeros),
        bad=[((ones, ones[:2]), r"dh \(3, 3\) and b \(2, 3\)"), ((ones, integers), r"b .*int64.*\(3, 3\)")],
    ),
]
each_metric = pytest.mark.parametrize("case", CASES, ids=lambda case: case.metric.__name__)


def fed(metric, batches):
    for batch in batches:
        metric.update(*batch)
    return metric


@each_metric
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_batches_give_the_value_over_everything(case, dtype):
    batches = case.batches(dtype)
    value = fed(case.metric(), batches).compute()
    assert value.dtype == torch.float32
    assert value.shape == ()
    assert value.item() == pytest.approx(case.naive(batches), rel=5e-6)


@each_metric
def test_forward_gives_the_batch_and_accumulates(case):
    batches = case.batches(torch.float32)
    metric = case.metric()
    for batch in batches:
        assert metric(*batch).item() == pytest.approx(case.naive([batch]), rel=5e-6)
    assert metric.update_count == len(batches)
    assert metric.compute().item() == pytest.approx(case.naive(batches), rel=5e-6)


@each_metric
def test_reset_forgets(case):
    first, *others = case.batches(torch.float32)
    metric = fed(case.metric(), others)
    metric.compute()
    metric.reset()
    assert fed(metric, [first]).compute().item() == pytest.approx(case.naive([first]), rel=5e-6)


@each_metric
@pytest.mark.parametrize("copy", [lambda m: pickle.loads(pickle.dumps(m)), Metric.clone], ids=["pickle", "clone"])
def test_copies_go_on_by_themselves(case, copy):
    *first, last = case.batches(torch.float32)
    metric = fed(case.metric(), first)
    other = fed(copy(metric), [last])
    assert other.compute().item() == pytest.approx(case.naive([*first, last]), rel=5e-6)
    assert metric.compute().item() == pytest.approx(case.naive(first), rel=5e-6)


@each_metric
def test_states_merge(case):
    *first, last = case.batches(torch.float32)
    metric = fed(case.metric(), first)
    metric.merge_state(fed(case.metric(), [last]))
    assert metric.compute().item() == pytest.approx(case.naive([*first, last]), rel=5e-6)


@each_metric
def test_what_has_no_value_is_left_out(case):
    alone = fed(case.metric(), [case.void])
    assert alone.compute().isnan()
    expected = fed(case.metric(), [case.good]).compute()
    assert fed(case.metric(), [case.void, case.good, case.void]).compute() == expected
    assert expected.isfinite()


def test_zero_matrices():
    norm, rank, alignment = SpectralNorm(), StableRank(), Alignment()
    stack = torch.stack([2 * torch.eye(3), zeros])
    assert norm(stack) == 1  # a zero matrix has norm 0, and that is a value
    assert rank(stack) == 3  # but no stable rank
    assert alignment(zeros, ones).isnan()
    assert alignment(torch.eye(3), ones) == pytest.approx(1)
    assert alignment.compute() == pytest.approx(1)


@each_metric
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_entries_spoil_the_value_whatever_follows(case, bad):
    spoiled = tuple(argument.clone() for argument in case.good)
    spoiled[0][1, 1] = bad
    value = fed(case.metric(), [case.good, spoiled, case.void, case.good]).compute()
    assert value.isnan()


@pytest.mark.parametrize("A", [zeros, ones], ids=["zero weight", "weight"])
def test_bad_rows_spoil_alignment_even_beside_a_zero_weight(A):
    assert fed(Alignment(), [(A, ones * math.nan), (ones, ones)]).compute().isnan()


@each_metric
def test_bad_arguments_are_named_and_leave_no_trace(case):
    metric = fed(case.metric(), [case.good])
    expected = metric.compute()
    for arguments, message in case.bad:
        with pytest.raises(ValueError, match=message):
            metric.update(*arguments)
    assert metric.compute() == expected


@pytest.mark.parametrize("metric", [SpectralNorm, StableRank, Alignment])
def test_tolerance_and_exact_reach_the_estimate(metric):
    arguments = (gaussian(150, 150),) if metric is not Alignment else (gaussian(150, 150), gaussian(9, 150, seed=1))
    with pytest.raises(ValueError, match=r"tol must be in \(0, 1\), got 3"):
        metric(tol=3)(*arguments)
    exact, rough = (metric(**options)(*arguments).item() for options in ({"exact": True}, {"tol": 0.5}))
    assert exact == pytest.approx(next(c for c in CASES if c.metric is metric).naive([arguments]), rel=1e-5)
    assert rough != pytest.approx(exact, rel=1e-4)


def test_small_angle_over_batches():
    b = gaussian(100, 16, dtype=torch.float64)
    across = gaussian(100, 16, dtype=torch.float64, seed=1)
    across -= (across * b).sum() / (b * b).sum() * b
    dh = -b / b.norm() + 1e-4 * across / across.norm()
    metric = BackwardFeatureAngle()
    for part in (slice(0, 1), slice(1, 60), slice(60, 100)):
        metric.update(dh[part].float(), b[part].float())
    assert metric.compute().item() == pytest.approx(1e-4, rel=1e-2)


def test_angle_is_of_the_whole_and_not_a_mean_of_angles():
    metric = BackwardFeatureAngle()
    assert metric(torch.tensor([-3.0]), torch.tensor([3.0])) == 0
    assert metric(torch.tensor([1.0]), torch.tensor([1.0])) == pytest.approx(math.pi)
    assert metric.compute() == pytest.approx(math.acos(0.8))


@each_metric
def test_sums_survive_a_module_cast_to_half_precision(case):
    """Lightning's "bf16-true" calls .to(torch.bfloat16) on the whole module, and that reaches metric states."""
    batches = case.batches(torch.float32)
    module = nn.ModuleDict({"metric": case.metric()}).to(torch.bfloat16)
    for _ in range(200):
        fed(module["metric"], batches)
    assert module["metric"].compute().item() == pytest.approx(case.naive(batches), rel=5e-6)


@pytest.mark.few(3)
@each_metric
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_survive_set_dtype(case, dtype):
    """Which, unlike a module's cast, reaches the count too: in bfloat16 it would stay at 256."""
    metric, batches = case.metric().set_dtype(dtype), case.batches(torch.float32)
    for _ in range(200):
        fed(metric, batches)
    assert metric.compute().item() == pytest.approx(case.naive(batches), rel=5e-6)


@pytest.mark.parametrize("turn", [0.0, 1e-6, 1e-3, 1.0, math.pi])
def test_angles_of_many_entries_are_right_to_a_millionth(turn):
    b, across = gaussian(1 << 21, dtype=torch.float64), gaussian(1 << 21, dtype=torch.float64, seed=1)
    across -= (across * b).sum() / (b * b).sum() * b
    dh = -math.cos(turn) * b + math.sin(turn) * across * b.norm() / across.norm()
    assert BackwardFeatureAngle()(1e-3 * dh, b).item() == pytest.approx(turn, rel=0, abs=1e-6)


def test_rows_that_become_nan_are_not_left_out():
    before, after = ones.clone(), ones.clone()
    before[0], after[0] = 0, math.nan
    assert fed(FeatureChange(), [(before, after)]).compute().isnan()


@pytest.mark.parametrize("scale", [1e-22, 1e-36, 1e30])
def test_rows_that_cannot_be_squared_count_as_others(scale):
    """Scaled by a power of two, so that nothing is rounded."""
    scale = 2.0 ** round(math.log2(scale))
    for case in CASES:
        batches = case.batches(torch.float32)
        if case.metric not in (SpectralNorm, StableRank):
            scaled = [tuple(scale * argument for argument in batch) for batch in batches]
            assert fed(case.metric(), scaled).compute().item() == pytest.approx(case.naive(batches), rel=5e-6)


def test_alignment_does_not_multiply_in_the_precision_of_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        metric = fed(Alignment(), [(torch.eye(256), gaussian(8, 256))])
    assert metric.compute().item() == pytest.approx(1, abs=1e-6)


@each_metric
def test_keeps_no_graph_and_no_random_numbers(case):
    arguments = tuple(argument.clone().requires_grad_() for argument in case.good)
    rng = torch.get_rng_state()
    metric = case.metric()
    assert not metric(*arguments).requires_grad
    assert not any(state.requires_grad for state in metric.metric_state.values())
    assert torch.equal(torch.get_rng_state(), rng)


@each_metric
def test_declares_what_torchmetrics_asks_for(case):
    metric = case.metric(sync_on_compute=False)
    assert metric.is_differentiable is False
    assert metric.higher_is_better is None
    assert metric.full_state_update is False
    assert metric.plot_lower_bound is not None
    with pytest.raises(ValueError, match="Unexpected keyword arguments: `window`"):
        case.metric(window=3)


def test_collections_pass_arguments_by_name():
    collection = MetricCollection([SpectralNorm(), StableRank(), Alignment(), FeatureChange(), BackwardFeatureAngle()])
    collection.update(A=torch.eye(3), x=ones, h_before=ones, h_after=2 * ones, dh=-ones, b=ones)
    expected = {"SpectralNorm": 1, "StableRank": 3, "Alignment": 1, "FeatureChange": 1, "BackwardFeatureAngle": 0}
    assert {name: value.item() for name, value in collection.compute().items()} == pytest.approx(expected, abs=1e-6)


def test_collections_hold_every_metric_apart():
    """One state for all would do at first: a single direction of norm 1 is of rank 1, however it is measured."""
    batches = [(torch.nn.functional.normalize(gaussian(1, 150)),), (gaussian(150, 150, seed=1),)]
    rough, exact = SpectralNorm(tol=0.5), SpectralNorm(exact=True)
    collection = MetricCollection({"rough": rough, "exact": exact, "ranks": StableRank(exact=True)})
    for batch in batches:
        collection.update(*batch)
    naive = {case.metric: case.naive(batches) for case in CASES[:2]}
    found = collection.compute()
    assert found["exact"].item() == pytest.approx(naive[SpectralNorm], rel=1e-5)
    assert found["ranks"].item() == pytest.approx(naive[StableRank], rel=1e-5)
    assert found["rough"].item() == fed(SpectralNorm(tol=0.5), batches).compute().item()
    assert found["rough"].item() != pytest.approx(naive[SpectralNorm], rel=1e-4)


@each_metric
def test_a_state_dict_brings_the_value_back(case):
    *first, last = case.batches(torch.float32)
    metric, other = fed(case.metric(), first), case.metric()
    for one in (metric, other):
        one.persistent(True)
    other.load_state_dict(metric.state_dict())
    assert fed(other, [last]).compute().item() == pytest.approx(case.naive([*first, last]), rel=5e-6)


def test_sums_are_readable():
    metric = fed(FeatureChange(), [(ones, 1.5 * ones)])
    assert (metric.total.item(), metric.count.item()) == (1.5, 3)


@each_metric
def test_plots_one_value_or_a_curve(case):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    plt = pytest.importorskip("matplotlib.pyplot")
    metric = case.metric()
    values = [metric(*batch) for batch in case.batches(torch.float32)]
    figure, axis = metric.plot()
    assert isinstance(figure, plt.Figure)
    assert axis.lines[0].get_ydata() == pytest.approx([metric.compute().item()])
    curve, axis = metric.plot(values)
    assert axis.lines[0].get_ydata() == pytest.approx([value.item() for value in values])
    none, same = metric.plot(values, ax=axis)
    assert none is None
    assert same is axis
    plt.close(figure)
    plt.close(curve)


@pytest.mark.slow
def test_imports_and_computes_without_matplotlib():
    script = """
import sys
from lightning_utilities.core.imports import RequirementCache
there = RequirementCache.__bool__
RequirementCache.__bool__ = lambda self: "matplotlib" not in self.requirement and there(self)
sys.modules["matplotlib"] = None
import torch
from spectral_monitor.metrics import SpectralNorm
metric = SpectralNorm()
print(metric(torch.eye(2)).item())
try:
    metric.plot()
except ModuleNotFoundError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("1.0\n")
    assert "`matplotlib` to be installed" in result.stdout
