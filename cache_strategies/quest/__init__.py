"""quest: a paged KV cache whose decode rows read the blocks that may matter most to their query, and keeps all keys."""
