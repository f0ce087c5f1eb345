"""State of objects: remembered, put back, serialized. It knows nothing of layers."""
