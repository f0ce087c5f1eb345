"""Hooks on modules, tensors and optimizers."""
