"""Shadows: requests that also run under a candidate instance, so that its logits are compared with those served."""
