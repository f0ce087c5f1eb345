"""Sharding: which process holds which weights, and which of them measures each."""

from spectral_monitor.sharding.fsdp1 import call_through, reshard
from spectral_monitor.sharding.plan import Holding, copies, flat_extents, placed, plan
from spectral_monitor.sharding.process_group import ProcessGroup
from spectral_monitor.sharding.rectangles import Rectangle
from spectral_monitor.sharding.shard_region import Range, ShardRegion

__all__ = [
    "Holding",
    "ProcessGroup",
    "Range",
    "Rectangle",
    "ShardRegion",
    "call_through",
    "copies",
    "flat_extents",
    "placed",
    "plan",
    "reshard",
]
