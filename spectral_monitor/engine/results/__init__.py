"""From raw numbers to a measurement."""
