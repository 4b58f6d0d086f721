"""TODO server/processes."""
