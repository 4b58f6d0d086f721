"""Models: reading their configs and weights, and the forward pass. Imports `kernels`, but no cache strategies."""
