"""`python -m tools.bench.checks`: measures checks of addresses, and copying the tokens that a strategy keeps."""
