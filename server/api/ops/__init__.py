"""TODO server/api/ops."""
