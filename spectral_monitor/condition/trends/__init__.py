"""Deviations that only several measurements show together."""
