"""Files of runs: write them, find them, read them, convert them."""
