"""Sharding: which process holds which weights, and which of them measures each."""

from spectral_monitor.sharding.fsdp1 import call_through, flat_extents, reshard
from spectral_monitor.sharding.plan import NOTHING, Holding, copies, placed, plan
from spectral_monitor.sharding.process_group import ProcessGroup
from spectral_monitor.sharding.rectangles import Rectangle
from spectral_monitor.sharding.shard_region import Range, ShardRegion
from spectral_monitor.sharding.training_processes import (
    check_same_weights,
    check_settings,
    fsdp1_wrapper,
    mean_over_processes,
    refuse_several,
    training_processes,
)

__all__ = [
    "NOTHING",
    "Holding",
    "ProcessGroup",
    "Range",
    "Rectangle",
    "ShardRegion",
    "call_through",
    "check_same_weights",
    "check_settings",
    "copies",
    "flat_extents",
    "fsdp1_wrapper",
    "mean_over_processes",
    "placed",
    "plan",
    "refuse_several",
    "reshard",
    "training_processes",
]
