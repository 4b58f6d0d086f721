"""Grammars that bound what a model writes (structured output): JSON schemas, regular expressions, choices, Lark."""
