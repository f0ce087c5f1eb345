"""What TensorBoard is given."""
