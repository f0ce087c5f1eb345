"""How much a measured step reads, counted: passes over every matrix, and growth with width, depth and batch."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

from benchmarks.char_transformer import CharTransformer
from benchmarks.counting.counts import Counts, Watch, beyond, count

TIERS = ("light", "standard")
MATRICES = ("W", "dW", "drift")


def network(width: int, depth: int) -> CharTransformer:
    torch.manual_seed(0)
    return CharTransformer(66, width, depth, 4, 32)


def tokens(repeats: int) -> torch.Tensor:
    """A batch, or one of more samples with the same gradient."""
    torch.manual_seed(1)
    return torch.randint(66, (2, 4, 32)).repeat(1, repeats, 1)


@functools.cache
def counted(
    tier: str, width: int = 96, depth: int = 2, repeats: int = 1, samples: str | None = "auto"
) -> tuple[Counts, int]:
    """Return counts of a measured step, and the number of parameters."""
    model, batch = network(width, depth), tokens(repeats)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = count(model, optimizer, lambda model: model(*batch), quantities=tier, max_rows=64, replay_samples=samples)
    return counts, sum(p.numel() for p in model.parameters())


def lanczos_steps(counts: Counts) -> int:
    return sum(counts.steps.values())


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("tier", TIERS)
def test_passes_over_a_matrix_are_those_of_its_lanczos_and_four_more(tier):
    counts, _ = counted(tier)
    names = [name for name, _ in network(96, 2).named_parameters()]
    assert set(counts.passes) == {(matrix, name) for matrix in MATRICES for name in names}
    assert max(counts.steps.values()) >= 4  # large matrices are there
    too_many = {key: (by, counts.readers[key]) for key, by in beyond(counts).items()}
    assert too_many == {}


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("tier", TIERS)
def test_bytes_read_are_linear_in_the_number_of_parameters_as_the_width_grows(tier):
    (narrow, few), (wide, many) = counted(tier), counted(tier, width=192)
    fixed, linear = wide.read_fixed, narrow.read_fixed * many / few
    assert fixed <= linear
    # A wider matrix may take Lanczos more steps; what a step reads must be linear.
    longer = max(1.0, lanczos_steps(wide) / lanczos_steps(narrow))
    read, linear = wide.read, narrow.read * many / few * longer
    assert read <= linear


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("tier", TIERS)
def test_operators_and_bytes_are_linear_in_the_depth(tier):
    (shallow, _), (deep, _) = counted(tier), counted(tier, depth=8)
    for name in ("operators_fixed", "operators", "read_fixed"):
        some, linear = getattr(deep, name), 4 * getattr(shallow, name)
        assert some <= linear, name
    read, linear = deep.read, max(4.0, lanczos_steps(deep) / lanczos_steps(shallow)) * shallow.read
    assert read <= linear


@pytest.mark.slow
def test_tier_light_does_not_grow_with_the_batch():
    (small, _), (large, _) = counted("light"), counted("light", repeats=4)
    for name in ("operators", "read", "allocations", "allocated", "crossings", "passes", "steps"):
        assert getattr(large, name) == getattr(small, name), name
    assert small.forwards == large.forwards == 0
    assert large.peak <= small.peak


def forward_bytes(repeats: int) -> int:
    """What a forward without gradients reads, and the copies of its arguments: kept, and given to the second one."""
    model, batch = network(96, 2), tokens(repeats)
    watch = Watch(model)
    with watch, watch.step() as tally, torch.no_grad():
        model(*batch.clone().clone())
    return tally.read.total()


@pytest.mark.slow
def test_tier_standard_grows_with_the_batch_by_one_forward_alone():
    """Beyond it are statistics of rows, of at most ``max_rows`` of them: both batches have more."""
    (small, _), (large, _) = (counted("standard", repeats=repeats, samples=None) for repeats in (1, 4))
    assert small.forwards == large.forwards == 1
    assert large.operators == small.operators
    growth = forward_bytes(4) - forward_bytes(1)
    assert growth > 0
    more = large.read - small.read
    assert more <= growth
    assert large.crossings == small.crossings


@pytest.mark.slow
def test_by_default_it_grows_with_neither():
    """Batches of 16 and of 64 samples of 32 rows: eight are run again. Arguments are kept, copied once."""
    (small, _), (large, _) = counted("standard", repeats=4), counted("standard", repeats=16)
    assert small.forwards == large.forwards == 1
    assert large.operators == small.operators
    kept = 3 * (tokens(16).nbytes - tokens(4).nbytes)
    assert abs(large.read - small.read) <= kept


@functools.cache
def counted_beside_depthwise(channels: int) -> Counts:
    """Return counts of a linear layer with rows enough, after a depthwise convolution of 49 matrices a channel."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(channels, channels, 7, padding=3, groups=channels),
        torch.nn.Flatten(2),
        torch.nn.Linear(64, 32),
        torch.nn.Tanh(),
        torch.nn.Linear(32, 8),
    )
    x = torch.randn(16, channels, 8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return count(model, optimizer, lambda model: model(x).square().mean(), quantities="standard")


def test_a_depthwise_convolution_is_not_filled_up_to_the_rows_of_its_neighbours():
    """Its thousands of matrices get few rows each: together 2^18, some seventy times read."""
    counts = counted_beside_depthwise(256)
    read = sum(of for place, (_, of) in counts.functions.items() if place.startswith("functional/features.py"))
    assert 2**18 < read < 80 * 8 * 2**18


def test_the_host_waits_as_often_for_stacks_of_extreme_matrices_as_for_one():
    """Updates of 1e-20, which are scaled before they are squared, in layers of many shapes."""
    waits = []
    for depth in (2, 8):
        torch.manual_seed(0)
        widths = [8 + 2 * k for k in range(depth + 1)]
        model = torch.nn.Sequential(*(torch.nn.Linear(n, m) for n, m in itertools.pairwise(widths)))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-20)
        x = torch.randn(16, 8)
        with torch.no_grad():
            for p in model.parameters():
                p *= 1e-8  # or the updates would round to nothing
        waits.append(count(model, optimizer, lambda model, x=x: model(x).sum() * 1e4, quantities="light").crossings)
    assert waits[0] == waits[1]
