"""Several replicas on Ray Serve beside one server: `python -m tools.bench.replicas`."""
