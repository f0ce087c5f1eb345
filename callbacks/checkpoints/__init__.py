"""The state of a monitor in a checkpoint, and the hooks that write and read it."""
