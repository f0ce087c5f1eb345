"""Weights whose use their module's type does not say: lookalikes of ``nn.Linear``, experts, bare parameters."""
