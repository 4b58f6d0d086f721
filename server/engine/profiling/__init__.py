"""TODO server/engine/profiling."""
