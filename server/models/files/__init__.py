"""Finds the files of a model: in a directory, in the user's cache, or on the Hugging Face hub."""
