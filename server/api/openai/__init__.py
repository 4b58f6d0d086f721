"""TODO server/api/openai."""
