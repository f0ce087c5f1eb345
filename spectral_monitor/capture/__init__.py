"""Hooks that record one optimizer step, and replays of its forward pass afterwards."""
