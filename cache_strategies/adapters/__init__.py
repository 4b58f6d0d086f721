"""KV caches for programs without this server: for transformers' `generate`, and the textbook's own GPT."""
