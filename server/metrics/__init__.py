"""Prometheus metrics: `families` declares them, `registry` counts, `exposition` writes the text."""
