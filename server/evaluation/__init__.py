"""Measures the quality of cache strategies: runs the same texts under several, and compares with exact caching."""
