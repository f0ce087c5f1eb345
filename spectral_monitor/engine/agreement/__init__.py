"""Agreement of processes: each reports what it saw of a step, and afterwards all know the same."""
