"""Replay of a forward pass without side effects."""
