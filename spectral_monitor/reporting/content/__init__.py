"""Content of reports, whatever shows it: the answer, its numbers, their questions, their names."""
