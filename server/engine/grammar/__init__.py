"""Grammars in the engine: compiling them beside the steps, and the state of each constrained request."""
