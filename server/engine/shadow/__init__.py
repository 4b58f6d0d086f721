"""Shadows: requests that also run under a candidate instance, to measure live how far its logits are from the served."""
