"""Weights of modules whose class is not known: lookalikes of ``nn.Linear``, experts, bare parameters."""
