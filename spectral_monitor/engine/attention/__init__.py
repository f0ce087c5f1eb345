"""Attention blocks in a measured step: their weights, their logits on a few rows."""
