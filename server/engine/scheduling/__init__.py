"""TODO server/engine/scheduling."""
