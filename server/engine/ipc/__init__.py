"""TODO server/engine/ipc."""
