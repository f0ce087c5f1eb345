"""Quantities: one entry for each, from which its measurement, logging, charts and documentation follow.

A quantity is an entry of :mod:`~spectral_monitor.quantities.weights`, :mod:`~spectral_monitor.quantities.features`,
:mod:`~spectral_monitor.quantities.attention`, :mod:`~spectral_monitor.quantities.assumptions`,
:mod:`~spectral_monitor.quantities.laziness`, :mod:`~spectral_monitor.quantities.optimizers` or
:mod:`~spectral_monitor.quantities.signals`, or is added with :func:`register`.
"""

from spectral_monitor.quantities.quantity import Column, Formula, Quantity, Tier
from spectral_monitor.quantities.readings import Readings
from spectral_monitor.quantities.registry import QUANTITIES, TIERS, needs, register, resolve, unregister

__all__ = [
    "QUANTITIES",
    "TIERS",
    "Column",
    "Formula",
    "Quantity",
    "Readings",
    "Tier",
    "needs",
    "register",
    "resolve",
    "unregister",
]
