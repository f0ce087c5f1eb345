"""Tables and verdicts as text."""
