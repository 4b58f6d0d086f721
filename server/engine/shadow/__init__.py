"""Shadows: requests that also run under a second instance, whose logits are compared with those served."""
