"""Structured output: the fields that constrain a text, and their check."""
