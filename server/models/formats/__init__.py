"""TODO server/models/formats."""
