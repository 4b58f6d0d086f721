"""The strategy `streaming`: sinks and a window whose positions are counted within the cache."""
