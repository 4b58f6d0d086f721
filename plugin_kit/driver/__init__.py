"""Runs texts through caches, and computes what must come out: shared by all checks. Knows no strategy."""
