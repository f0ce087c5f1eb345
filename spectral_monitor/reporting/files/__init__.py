"""Runs in files: written, found, read, converted."""
