"""Run from the top folder: ``from tests.noninterference import zoo``."""
