"""The reference: every operation in plain torch, on any device. The other backends are compared with it."""
