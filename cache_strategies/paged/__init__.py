"""paged: a KV cache of small blocks, which sequences with a common prefix share."""
