"""Sweeps over widths and depths: points, their storage, slopes, verdicts, tables and pictures."""
