"""TODO server/engine/sampling."""
