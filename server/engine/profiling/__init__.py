"""Recordings of the engine's steps, by torch's profiler or as Metal captures. Knows neither requests nor HTTP."""
