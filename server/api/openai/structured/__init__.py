"""Structured output: the fields that say what a text has to be, and their check."""
