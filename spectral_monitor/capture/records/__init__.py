"""What hooks record of a call."""
