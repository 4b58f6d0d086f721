"""The processes of a running server: their supervisor, how each starts and ends, and their heartbeats."""
