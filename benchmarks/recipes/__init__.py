"""Healthy training recipes, planted faults, and what the judge says of them."""
