"""What every process saw of a step, and what all of them then know."""
