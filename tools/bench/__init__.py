"""Benchmarks for the project's claims about speed: `make bench`, and single ones by `python -m tools.bench.NAME`."""
