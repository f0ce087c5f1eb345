"""Fits to measured numbers: power laws with intervals, and limits of infinite width."""
