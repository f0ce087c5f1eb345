"""Two gloo processes with unequal shares of the rows give the value one process gives over all rows."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from spectral_monitor.metrics import Alignment, BackwardFeatureAngle, FeatureChange, SpectralNorm, StableRank
from tests.gloo import on_processes

METRICS = {
    metric.__name__: metric for metric in (Alignment, BackwardFeatureAngle, FeatureChange, SpectralNorm, StableRank)
}
ROWS = 14
# How many of the 14 rows (or matrices) the first process has; the second has the others.
SHARES = {"uneven": 3, "idle": 0}


def arguments(name, first, last):
    """The rows, or matrices, from ``first`` to ``last`` of data every process can make."""
    generator = torch.Generator().manual_seed(7)
    one, two = torch.randn(2, ROWS, 6, generator=generator, dtype=torch.float64)
    stack = torch.randn(ROWS, 5, 4, generator=generator, dtype=torch.float64)
    weight = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    stack[1], one[2], two[2] = 0, 0, 0
    rows = slice(first, last)
    if name in ("SpectralNorm", "StableRank"):
        return (stack[rows],)
    if name == "Alignment":
        return weight, one[rows]
    if name == "FeatureChange":
        return one[rows], two[rows]
    # dh nearly along -b: a small angle, for which every digit of the sums counts.
    return (1e-3 * two - one)[rows], one[rows]


def process():
    rank = dist.get_rank()
    results = {}
    for name, metric_class in METRICS.items():
        for share, border in SHARES.items():
            metric = metric_class()
            first, last = (0, border) if rank == 0 else (border, ROWS)
            if last > first:
                # In two batches, with a compute between them: synchronizing must leave each process its own sums.
                metric.update(*arguments(name, first, first + 1))
                if share == "uneven":
                    metric.compute()
                metric.update(*arguments(name, first + 1, last))
            local = {key: state.clone() for key, state in metric.metric_state.items()}
            results[name, share] = metric.compute()
            results[name, share, "kept"] = all(torch.equal(metric.metric_state[key], local[key]) for key in local)
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return on_processes(process, tmp_path_factory.mktemp("gloo"))


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", METRICS)
def test_two_processes_equal_one(results, name, share):
    metric = METRICS[name]()
    metric.update(*arguments(name, 0, ROWS))
    expected = metric.compute()
    assert expected.isfinite()
    for result in results:
        torch.testing.assert_close(result[name, share], expected, rtol=1e-6, atol=0)
        assert result[name, share, "kept"]


@pytest.mark.parametrize("name", METRICS)
def test_the_mean_of_the_processes_would_be_another_number(name):
    """Else the test above could not fail."""
    shares = []
    for first, last in ((0, SHARES["uneven"]), (SHARES["uneven"], ROWS)):
        metric = METRICS[name]()
        shares.append(metric(*arguments(name, first, last)))
    whole = METRICS[name]()(*arguments(name, 0, ROWS))
    assert abs(sum(shares) / 2 - whole) > 1e-3 * whole
