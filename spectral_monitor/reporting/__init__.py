"""What people see: text tables."""

from spectral_monitor.reporting.table import measurement_table, role_table

__all__ = ["measurement_table", "role_table"]
