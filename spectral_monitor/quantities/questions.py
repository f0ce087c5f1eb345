"""The questions that panels answer: titles, in their order."""

UPDATES = "Are updates the right size?"
FEATURES = "Are features moving?"
WEIGHTS = "Are weights the right size?"
ALIGNMENT = "Is the output layer aligned?"
RANK = "Are updates low-rank?"
DIRECTIONS = "Do the backward and feature directions agree?"
CORRECTION = "What did the corrector do?"
