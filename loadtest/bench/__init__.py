"""`kvmux bench`: loads a running server with workloads of exact lengths, and reports on each of its strategies."""
