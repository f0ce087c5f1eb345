"""What a checkpoint holds of a monitor, and the hooks that write and read it."""
