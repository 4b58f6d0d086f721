"""Compares mirrored with reading grouped heads in place: `python -m tools.bench.mirrored`."""
