"""Other servers of models: installing them, each in a folder and an environment of its own, and running them."""
