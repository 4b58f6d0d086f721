"""Recordings of the engine's own steps. Knows neither requests nor HTTP."""
