"""compressed: a KV cache that keeps the keys a scorer ranks highest, and frees the memory of all others."""
