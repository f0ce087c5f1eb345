"""Scales of weights and learning rates by width and depth: rules, what they predict, and their use."""
