"""Measures other servers beside kvmux, with the same model, workloads and client: `make bench-peers`."""
