"""The socket between API workers and the engine: both ends of it, and the messages."""
