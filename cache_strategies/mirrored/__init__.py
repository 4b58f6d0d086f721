"""The strategy mirrored: a history, and a mirror of it that is repeated for the query heads that share a KV head."""
