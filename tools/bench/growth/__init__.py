"""Measures how the costs of the engine grow with load."""
