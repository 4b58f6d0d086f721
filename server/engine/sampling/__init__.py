"""Sampling of tokens from logits: logits processors, log-probabilities and speculative decoding."""
