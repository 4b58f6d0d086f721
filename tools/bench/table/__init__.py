"""The table that `make bench` prints: goals, the peers of each row, runs, and the machine's limits."""
