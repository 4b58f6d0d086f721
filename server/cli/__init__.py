"""TODO server/cli."""
