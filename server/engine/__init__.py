"""The engine: requests in, tokens out, in a process of its own; and both ends of the socket that leads to it."""
