"""The command ``spectral-monitor``."""

from __future__ import annotations


def main() -> None:
    """Placeholder until the commands are there."""
