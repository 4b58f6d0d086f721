"""Compares how fast tokens are decoded under several cache strategies."""
