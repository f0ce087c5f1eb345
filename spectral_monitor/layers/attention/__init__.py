"""Attention blocks: their projections, and the outputs that are the queries and keys of each head."""

from spectral_monitor.layers.attention.blocks import ONE_HEAD, AttentionBlock, Projection, attention_blocks
from spectral_monitor.layers.attention.local_heads import SPREAD, LocalHeads, local_heads
from spectral_monitor.layers.attention.names import written_as

__all__ = [
    "ONE_HEAD",
    "SPREAD",
    "AttentionBlock",
    "LocalHeads",
    "Projection",
    "attention_blocks",
    "local_heads",
    "written_as",
]
