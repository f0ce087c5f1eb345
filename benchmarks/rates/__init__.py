"""Learning rates: corrected ones, and their transfer to wider networks."""
