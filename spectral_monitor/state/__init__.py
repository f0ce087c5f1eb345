"""What objects hold: remembered, put back, told in plain types. Knows nothing of layers."""
