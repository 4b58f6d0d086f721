"""The reference: every operation in plain torch, on any device. Other backends are compared with its results."""
