"""One optimizer step seen from outside, and the same forward once more after it."""
