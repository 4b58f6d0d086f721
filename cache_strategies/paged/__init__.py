"""paged: a KV cache of small blocks, which later sequences with the same beginning find again."""
