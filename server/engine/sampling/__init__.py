"""From logits to tokens: processors, sampling, log-probabilities, speculative decoding."""
