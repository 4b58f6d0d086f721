"""TODO server/evaluation/corpus."""
