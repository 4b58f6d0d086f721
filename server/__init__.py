"""The server: command line, API processes, engine, models. May import every other package; none of them imports it."""
