"""Snapshots of objects: taken, restored, serialized. This package does not know layers."""
