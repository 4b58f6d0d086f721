"""Models: what a directory says about one, its weights, and the forward pass. Imports `kernels`, no strategy."""
