"""Records the engine's steps, with torch's profiler or as Metal captures. Knows neither requests nor HTTP."""
