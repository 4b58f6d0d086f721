"""Measures the quality of cache strategies: runs the same texts under each, and compares with exact caching."""
