"""Look at a model without training it: its layers, their roles, the size of its weights."""
