"""TODO server/text/processes."""
