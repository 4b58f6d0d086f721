"""The common parts of `tools.chaos` and `tools.soak`: a server, its load, and the checks of every answer."""
