"""What the monitor does on an accelerator."""
