"""The run of a monitor or a probe, what follows from its measurements, and a check before it."""
