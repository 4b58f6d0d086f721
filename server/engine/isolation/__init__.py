"""Keeps a fault of one strategy from reaching the requests of others: checked calls, quarantine, watchdogs."""
