"""Multipliers taken into the steps of optimizers that do not know of them."""
