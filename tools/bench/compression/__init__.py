"""Measures what the scorers of `compressed` cost in quality, and plots it."""
