"""The server: command line, API processes, engine, models. May import everything below it; nothing imports it."""
