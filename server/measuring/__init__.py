"""What profiles and benchmarks stand on: steps and their parts, servers as users start them, and who else was there."""
