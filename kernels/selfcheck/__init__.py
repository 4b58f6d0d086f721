"""Checks the operations of a backend against the reference before anything is served."""
