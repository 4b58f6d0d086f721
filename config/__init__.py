"""Settings: what there is to set, where a value comes from, and what is refused. Imports nothing of the project."""
