"""The TensorBoard sink."""
