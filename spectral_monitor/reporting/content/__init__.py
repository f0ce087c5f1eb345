"""The content of reports, whatever displays it: the answer, numbers, questions and names."""
