"""TODO kernels/selfcheck."""
