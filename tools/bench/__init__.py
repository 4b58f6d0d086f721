"""Benchmarks for the project's claims: `python -m tools.bench GROUP`, whose groups are modules of this folder."""
