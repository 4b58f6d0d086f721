"""Real models, served as users serve them: `make test` runs what needs SmolLM2 alone, `make test-real` the rest."""
