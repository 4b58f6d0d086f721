"""`kvmux bench`: loads a running server with workloads of exact lengths, and tells what each of its strategies did."""
