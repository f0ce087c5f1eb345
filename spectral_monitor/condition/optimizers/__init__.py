"""Optimizer settings of layers: families, learning rates that stand out, the recipe as a whole."""
