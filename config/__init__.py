"""The settings, the sources of their values, and which values are refused. Imports nothing of the project."""
