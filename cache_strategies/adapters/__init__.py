"""KV caches for use without the server: one for transformers' `generate`, and a simple one to learn from."""
