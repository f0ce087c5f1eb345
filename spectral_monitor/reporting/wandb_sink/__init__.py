"""What Weights & Biases is given."""
