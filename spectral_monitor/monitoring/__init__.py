"""What monitor and probe share: a run, what follows from its measurements, and a check before it."""
