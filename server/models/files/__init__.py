"""TODO server/models/files."""
