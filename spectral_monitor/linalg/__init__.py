"""Norms of large matrices, local or split over processes, in a small number of passes."""

from spectral_monitor.linalg.collectives import (
    AllReduce,
    Coroutine,
    all_reduce_norm,
    gather,
    rank_table,
    reduce_table,
    resume,
    run,
    run_local,
    sequence,
)
from spectral_monitor.linalg.extreme_eigenvalues import extreme_ritz_values
from spectral_monitor.linalg.host_to_device import to_device
from spectral_monitor.linalg.scaling import compute_dtype, frobenius, tame
from spectral_monitor.linalg.sharded_stack import Shard, ShardedStack
from spectral_monitor.linalg.spectral_norms import (
    MAX_MISS_PROBABILITY,
    MAX_STEPS,
    SpectralEstimate,
    spectral_estimate,
    spectral_estimates,
)

__all__ = [
    "MAX_MISS_PROBABILITY",
    "MAX_STEPS",
    "AllReduce",
    "Coroutine",
    "Shard",
    "ShardedStack",
    "SpectralEstimate",
    "all_reduce_norm",
    "compute_dtype",
    "extreme_ritz_values",
    "frobenius",
    "gather",
    "rank_table",
    "reduce_table",
    "resume",
    "run",
    "run_local",
    "sequence",
    "spectral_estimate",
    "spectral_estimates",
    "tame",
    "to_device",
]
