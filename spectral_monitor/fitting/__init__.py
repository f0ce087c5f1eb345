"""Fits to measured numbers: power laws with intervals, limits of infinite width, medians."""
