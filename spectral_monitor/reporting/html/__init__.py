"""The page about a run."""
