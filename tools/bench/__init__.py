"""What this project claims of its speed, measured: `make bench`; single parts by `python -m tools.bench.NAME`."""
