"""Requests in the engine, and which of them compute in the next step. Imports no torch."""
