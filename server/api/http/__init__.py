"""TODO server/api/http."""
