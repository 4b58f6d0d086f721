"""TODO cache_strategies/adapters."""
