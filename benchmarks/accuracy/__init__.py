"""How good spectral norms are, and features from few rows."""
