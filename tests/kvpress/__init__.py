"""Compares the keys that scorers keep with those that NVIDIA's kvpress keeps: `make test-kvpress`."""
