"""Recurrent states of a model's layers beside any strategy: slots, checkpoints, and the cache that pairs the two."""
