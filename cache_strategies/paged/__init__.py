"""TODO cache_strategies/paged."""
