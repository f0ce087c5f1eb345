"""Operators, collectives, bytes and memory of a measured step, counted."""
