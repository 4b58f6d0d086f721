"""Measures structured output: compiling grammars, masks, and what they cost a batch."""
