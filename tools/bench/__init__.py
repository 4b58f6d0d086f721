"""Measures what this project claims of its speed: `make bench`; single parts by `python -m tools.bench.NAME`."""
