"""Measure weights, updates, drift and gradients."""
