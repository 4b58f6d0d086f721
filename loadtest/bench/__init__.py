"""`kvmux bench`: benchmarks a running server with workloads of exact lengths, under each of its strategies."""
