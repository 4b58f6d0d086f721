"""`python -m tools.bench.hooks`: measures what a request with its own attention costs others in its batch."""
