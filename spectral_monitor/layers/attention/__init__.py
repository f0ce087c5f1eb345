"""Attention blocks: which outputs of which projections are the queries and the keys of which head."""

from spectral_monitor.layers.attention.blocks import ONE_HEAD, SPREAD, AttentionBlock, Projection, attention_blocks

__all__ = ["ONE_HEAD", "SPREAD", "AttentionBlock", "Projection", "attention_blocks"]
