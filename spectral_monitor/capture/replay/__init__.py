"""Run a forward pass again, leaving no trace."""
