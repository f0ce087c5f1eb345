"""What is shown of a measurement, whatever shows it: the answer, its numbers, their questions, their names."""
