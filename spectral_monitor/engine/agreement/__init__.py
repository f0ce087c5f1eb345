"""Agreement of processes: each reports what it saw of a step, and all of them know the same afterwards."""
