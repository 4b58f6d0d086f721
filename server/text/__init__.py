"""Text and tokens: tokenizer, incremental decoding, stop strings. Knows neither HTTP nor the engine."""
