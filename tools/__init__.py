"""Programs for developers. Not installed; run from a checkout: `python -m tools.chaos`, `python -m tools.soak`."""
