"""What the three papers measured, measured again with this instrument."""
