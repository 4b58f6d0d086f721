"""Clients people use, each pinned and installed by itself: `make test-clients` runs their checks against a server."""
