"""The engine's requests, the scheduler, and the selection of a request's strategy. Imports no torch."""
