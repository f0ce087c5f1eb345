"""Measure features, and how a step changes them."""
