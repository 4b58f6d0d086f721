"""Random tests that draw anew each time, and the failures they have found: `make fuzz`."""
