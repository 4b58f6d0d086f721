"""The inference engine, which runs in its own process, and both ends of the socket between it and the API workers."""
