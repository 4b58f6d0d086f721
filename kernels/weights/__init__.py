"""Formats of weights: as checkpoints store them, their conversions, and several weights used as one."""
